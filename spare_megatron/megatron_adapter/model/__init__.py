"""megatron-core's models, schedules, optimizer and parallel state, as one group's rank uses them."""
