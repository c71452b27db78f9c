"""Runs a warm-up microbatch in a process that will take over the state of others."""

from __future__ import annotations

from spare_megatron.collectives.converting import results_of
from spare_megatron.protocol.tickets import KnownTickets, Ticket
from spare_megatron.worker.engine import StepEngine


def warm_up(engine: StepEngine, step: int, piece: int) -> None:
    """Compute ``piece`` of ``step`` and its sum in the group, so that what a process does only once (imports,
    compiling, allocating) is done before others wait for it. The state that is fetched later replaces what this leaves.
    Collective in the group."""
    engine.begin_step(step)
    engine.run(step, KnownTickets([Ticket(piece)]))
    engine.local_sum()


def warm_update(engine: StepEngine, step: int, piece: int) -> None:
    """The same, and an update of the weights with the piece's gradient: the first update imports and allocates too.
    Collective in the group."""
    warm_up(engine, step, piece)
    results = results_of(engine.conversion(), engine.local_sum())
    engine.apply(step, results, engine.scalars())
