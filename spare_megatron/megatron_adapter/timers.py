"""megatron-core's timers, which users' forward steps start and stop."""

from __future__ import annotations

from typing import Any


def make_timers(log_level: int, log_option: str) -> Any:
    """Timers as Megatron makes them: those above ``log_level`` cost nothing. Imports megatron-core."""
    from spare_megatron.megatron_adapter.shims import install_cpu_shims

    install_cpu_shims()
    from megatron.core.timers import Timers

    return Timers(log_level, log_option)


def timers_text(timers: Any, steps: int) -> str:
    """Milliseconds a step of every timer that ran on some rank of the group, as ``--timing-log-option`` wants them.

    Resets them. Collective in the group; empty where nothing was timed.
    """
    import torch.distributed as dist

    mine = sorted(timers._timers)
    names: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(names, mine)
    known = sorted({name for part in names for name in part})
    return (timers.get_all_timers_string(known, normalizer=float(steps)) or "") if known else ""
