"""A pipeline whose stages sleep instead of computing: a device's time, which two cores do not limit.

Everything else is real: the programs of :mod:`spare_megatron.pipeline`, their exchanges over gloo, and the toy's
weights, which follow from the pieces that were added.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from spare_megatron.pipeline.operations import Exchange, Forward, Operation
from spare_megatron.pipeline.programs import OneForwardOneBackward
from spare_megatron.protocol.tickets import KnownTickets, Tickets
from tests.process.toy_engine import GRID, ToyEngine

FORWARD_SHARE = 1 / 3
"""Of the time that a piece takes on a stage."""


def drawn(jitter: float, group: int, step: int) -> float:
    """How many times as long pieces take a group in a step, drawn for both; 1 without jitter."""
    return min(2.0, max(0.5, random.Random(f"{group} {step}").gauss(1.0, jitter))) if jitter else 1.0


class SleepingPipeline(ToyEngine):
    """One stage."""

    def run(self, step: int, tickets: Tickets) -> None:
        program, pieces = OneForwardOneBackward(self.position, self.size), list[int]()
        for ticket in tickets if self.joins else KnownTickets(tickets):
            pieces.append(ticket.piece)
            self._carry_out(program.add(), pieces)
        self._carry_out(program.drain(), pieces)

    def _carry_out(self, operations: Sequence[Operation], pieces: Sequence[int]) -> None:
        for operation in operations:
            if isinstance(operation, Exchange):
                self._exchange(operation)
            elif isinstance(operation, Forward):
                self.on_piece("forward", operation.microbatch)
                time.sleep(self.piece_s * FORWARD_SHARE * self.slowness(self.step))
            else:
                time.sleep(self.piece_s * (1 - FORWARD_SHARE) * self.slowness(self.step))
                self._add_piece(pieces[operation.microbatch])
                self.on_piece("backward", operation.microbatch)

    def _add_piece(self, piece: int) -> None:
        self.accumulators[0] += (self.step * 5 + piece * 7 + self.position) % 64 / GRID
        self.inside += 1

    def _exchange(self, exchange: Exchange) -> None:
        posted = [dist.P2POp(dist.isend, torch.zeros(1), one.receiver(self.size)) for one in sorted(exchange.sends)]
        posted += [dist.P2POp(dist.irecv, torch.zeros(1), one.sender(self.size)) for one in sorted(exchange.receives)]
        for request in dist.batch_isend_irecv(posted):
            request.wait()
