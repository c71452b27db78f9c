"""megatron-core's checkpoint formats: reading, writing, optimizer state of any inner degree."""
