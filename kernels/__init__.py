"""Triton kernels of vllm-coserve."""
