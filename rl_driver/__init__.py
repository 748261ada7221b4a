"""The RL driver of vllm-coserve."""
