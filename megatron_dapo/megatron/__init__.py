"""The actor on megatron-core: model, schedules, optimizer and exact state. The only package that imports megatron.core."""
