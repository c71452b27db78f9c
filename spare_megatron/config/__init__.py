"""The configuration of a job: its shape, its settings, the faults to inject. Types and validation only."""

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.shape import JobShape

__all__ = ["ConfigError", "JobShape"]
