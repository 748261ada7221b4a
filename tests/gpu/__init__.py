"""Checks that need a CUDA device; `run.sh` runs all of them."""
