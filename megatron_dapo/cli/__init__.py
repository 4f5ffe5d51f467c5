"""The `megatron-dapo` command."""
