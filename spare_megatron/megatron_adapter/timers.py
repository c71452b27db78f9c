"""megatron-core's timers, which users' forward steps start and stop."""

from __future__ import annotations

from typing import Any


def make_timers(log_level: int, log_option: str) -> Any:
    """megatron-core's timers, of which those above ``log_level`` cost nothing. Imports megatron-core."""
    from spare_megatron.megatron_adapter.shims import install_cpu_shims

    install_cpu_shims()
    from megatron.core.timers import Timers

    return Timers(log_level, log_option)


def timers_text(timers: Any, steps: int) -> str:
    """Milliseconds per step of every timer that ran on some rank of the group, in the form of ``--timing-log-option``;
    empty where nothing was timed.

    Resets the timers. Collective in the group.
    """
    from spare_megatron.megatron_adapter.json_collectives import gather_json
    from spare_megatron.megatron_adapter.shims import compute_device

    parts = gather_json(sorted(timers._timers), compute_device())
    known = sorted({name for part in parts for name in part})
    return (timers.get_all_timers_string(known, normalizer=float(steps)) or "") if known else ""
