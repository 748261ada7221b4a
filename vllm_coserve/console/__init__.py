"""The `coserve` command."""
