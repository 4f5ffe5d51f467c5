"""Actor and critic on megatron-core: model, schedules, optimizer, exact state. Only this package imports megatron.core."""
