"""Computes a piece for nothing, in a process that will take over the state of others."""

from __future__ import annotations

from spare_megatron.controller.tickets import KnownTickets, Ticket
from spare_megatron.trainer.engine import StepEngine


def warm_up(engine: StepEngine, step: int, piece: int) -> None:
    """Compute ``piece`` of ``step`` and its sum in the group: what a process does only once (imports, compiling,
    allocating) would else be done when others wait for it. The state that comes replaces what this leaves. Collective
    in the group."""
    engine.begin_step(step)
    engine.run(step, KnownTickets([Ticket(piece)]))
    engine.local_sum()
