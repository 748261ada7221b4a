"""Part of vllm-coserve; see docs in the modules."""
