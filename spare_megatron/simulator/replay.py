"""Reads the losses of a real run from its journal, as a failure trace for the simulator."""

from __future__ import annotations

from pathlib import Path

from spare_megatron.coordinator.journal import read
from spare_megatron.protocol import messages as m
from spare_megatron.protocol.machine import initial_state, step
from spare_megatron.simulator.failures import Ring


def losses(path: Path) -> list[Ring]:
    """(seconds since the job first ran, group) of every loss of a member: a trace for ``spare-simulate --trace``."""
    rings: list[Ring] = []
    state, began = initial_state(), None
    for record in read(path):
        before = state
        state, _ = step(state, record.event)
        if began is None and state.phase == "running":
            began = record.time_unix_s
        if began is not None and isinstance(record.event, m.Lost):
            gone = sorted(group for group in before.live if group not in state.live)
            rings += [(record.time_unix_s - began, group) for group in gone]
    return rings
