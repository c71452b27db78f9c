"""megatron-core's timers, which users' forward steps start and stop."""

from __future__ import annotations

from typing import Any


def make_timers(log_level: int, log_option: str) -> Any:
    """Timers as Megatron makes them: those above ``log_level`` cost nothing. Imports megatron-core."""
    from spare_megatron.megatron_adapter.shims import install_cpu_shims

    install_cpu_shims()
    from megatron.core.timers import Timers

    return Timers(log_level, log_option)
