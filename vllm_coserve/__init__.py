"""vllm-coserve: lend a serving engine's idle compute and memory to an RL rollout model."""

__version__ = "0.1.0"
