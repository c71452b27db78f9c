"""What a rank does as a learner: it fetches the state of live groups, then their results, until its group is a member.

A *snapshot shard* is a rank's part of the offered state, or of the result of one later step. The ranks of a group
proceed in lockstep: none continues from a state, or applies a result, before every rank has its snapshot shard. So
whenever an offer ends, all ranks have the same state or none has one (docs/protocol.md, rules 16 to 19). Ranks learn of
the end of an offer at different times. Therefore they exchange what each has seen after every snapshot shard. t* is the
last committed step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from typing import NoReturn

import torch

from spare_megatron.collectives.handshake import Member
from spare_megatron.control_plane.session import Session
from spare_megatron.protocol.member import Orders
from spare_megatron.protocol.view import Offer
from spare_megatron.transfer.transport import (
    FetchError,
    FetchOverError,
    GoneError,
    SnapshotShard,
    Source,
    StateTransport,
)
from spare_megatron.worker.engine import StepEngine, rows_of
from spare_megatron.worker.group_rounds import Gather
from spare_megatron.worker.rank_parts import RankParts
from spare_megatron.worker.step import Joined
from spare_megatron.worker.ticket_reader import LeaveError
from spare_megatron.worker.warm_up import warm_up


class _Seen(IntEnum):
    """What a rank knows when a round is made."""

    ENDED = 0
    HAS = 1
    """It has its parts of a snapshot shard."""
    JOINED = 2
    OVER = 3


@dataclass
class CatchUp:
    """The learner's side of one rank. Belongs to the training thread."""

    engine: StepEngine
    session: Session
    transport: StateTransport
    gather: Gather
    device: torch.device
    """Of the results that are applied."""
    gone_s: float
    """How long this rank may receive later than a donor that its offer has ended."""
    inject: Callable[[str, int, int], None]
    """``inject(point, step, n)`` is called with the number of each thing that has come."""
    cold: bool = True
    """Whether this process has computed nothing yet."""
    parts: RankParts = field(default_factory=RankParts)
    """Takes note of what this rank does when."""
    more: Sequence[StateTransport] = ()
    """Of this rank's rows after the first one."""
    _came: int = field(default=0, init=False)
    """How often something has come."""
    _ended: int = field(default=0, init=False)
    """The newest offer that this rank followed."""
    _rests: Joined | None = field(default=None, init=False)
    """The state that all ranks of the group hold whole by that offer, also once it has ended; None before there is one,
    and while a state is taken, which overwrites the one before."""
    _fetched_s: float = field(default=0.0, init=False)
    """When the state of that offer had come."""

    def learn(self) -> Joined:
        """Follow offers until one makes the group a member; the engine then holds t*. Called again when the group was
        sent back.

        If the next result of an offer cannot be fetched, the group keeps the state that it has. If that is the state
        after t*, the coordinator may already have made the group a member because of it, before it received the report
        that the offer was given up.

        Raises:
            LeaveError: the job is over for this group.
        """
        if not self._ended:
            if self.cold:
                spec = self.session.spec
                warm_up(self.engine, spec.first_step + 1, self.session.orders.view.group * spec.pieces_per_shard)
            self.session.ready()
        while True:
            orders = self._next_offer()
            if self._rests is not None and self._is_there(self._rests, orders):
                joined = self._rests if self._all(_Seen.JOINED, self._rests.number, self._rests.step) else None
                if joined is None:
                    self.session.wait(orders.version)  # another rank has seen newer ones
            else:
                assert orders.view.offer is not None, "that is what was waited for"
                joined = self._follow(orders.view.offer, orders.donors_at)
            if joined is not None:
                self.parts.note("catch up", self._fetched_s, time.monotonic())
                return joined

    def _next_offer(self) -> Orders:
        """The orders with an offer that this rank has not followed, or by which its group is a member with the state
        that it holds."""
        orders = self.session.orders
        while not orders.over and (orders.view.offer is None or orders.view.offer.number <= self._ended):
            if self._rests is not None and self._is_there(self._rests, orders):
                return orders
            if orders.view.is_member and orders.view.offer is None:
                raise RuntimeError(f"this group is a member in epoch {orders.view.epoch} and does not hold the state")
            orders = self.session.wait(orders.version)
        if orders.over:
            self._leave()
        return orders

    def _follow(self, offer: Offer, donors_at: tuple[str, ...]) -> Joined | None:
        """Follow one offer; None where it ends before the group is a member that holds t*."""
        donors, rows = [Member(*donor) for donor in offer.donors], rows_of(self.engine)
        of_rows = zip(*(at.split(",") for at in donors_at), strict=True)
        sources = [[Source(*one) for one in zip(donors, at, strict=True)] for at in of_rows]
        self._ended, self._rests, began_s = offer.number, None, time.monotonic()
        states = self._fetch(offer, offer.step, sources, [row.state_tensors() for row in rows])
        self._fetched_s = time.monotonic()
        self.parts.note("transfer", began_s, self._fetched_s)
        if states is None:
            self._all(_Seen.ENDED, offer.number, offer.step)
            return None
        self._has(offer.step)
        if not self._all(_Seen.HAS, offer.number, offer.step):
            return None
        for row, state in zip(rows, states, strict=True):
            row.adopt_state(offer.step, state.values)
        self._rests = Joined(offer.step, offer.number)
        step, buffers = offer.step, [dict[str, torch.Tensor]() for _ in rows]
        while True:
            for number, row in zip(self.session.rows, rows, strict=True):
                self.session.caught_up(offer.number, step, row.weights_digest(), number)
            results = None if self._holds(offer, step) else self._fetch(offer, step + 1, sources, buffers)
            if results is None:
                seen = _Seen.JOINED if self._holds(offer, step) else _Seen.ENDED
                if seen is _Seen.JOINED:
                    self._has(step)
                return self._rests if self._all(seen, offer.number, step) else None
            self._has(step + 1)
            if not self._all(_Seen.HAS, offer.number, step + 1):
                return None
            step, buffers = step + 1, [dict(result.tensors) for result in results]
            self.engine.begin_step(step)
            reduced = [tensor for of_row in buffers for tensor in of_row.values()]
            self.engine.apply(step, reduced, results[0].values["scalars"])
            self._rests = Joined(step, offer.number)

    def _fetch(
        self, offer: Offer, step: int, sources: list[list[Source]], buffers_of: Sequence[Mapping[str, torch.Tensor]]
    ) -> list[SnapshotShard] | None:
        """Fetch the snapshot shard of ``step`` for each row, into the row's buffers if there are any. None if the offer
        has ended or is not served, or if this group is a member and needs no more."""

        def place(buffers: Mapping[str, torch.Tensor], snapshot_shard: SnapshotShard) -> Mapping[str, torch.Tensor]:
            if buffers:
                return buffers
            device = self.device
            return {
                n: torch.empty(one.shape, dtype=one.dtype, device=device) for n, one in snapshot_shard.tensors.items()
            }

        def over() -> bool:
            # A rank that still fetches is the one furthest behind in its group. Each call here reports progress.
            self.session.progress("start", step, 0)
            return self._without(offer) or self._holds(offer, step - 1)

        try:
            return [
                transport.fetch(offer.number, step, of_row, partial(place, buffers), over)
                for transport, of_row, buffers in zip((self.transport, *self.more), sources, buffers_of, strict=True)
            ]
        except FetchOverError:
            return None
        except GoneError as error:
            # A donor may receive the end of the offer, or the record that made its group a member, before this rank
            # does.
            if not self._wait_until(over):
                self.session.void(offer.number, str(error))
        except FetchError as error:
            self.session.void(offer.number, str(error))
        return None

    def _has(self, step: int) -> None:
        """Note that this rank has fetched the state or the result of ``step``, or that its group is a member."""
        self.inject("join", step, self._came)
        self._came += 1
        self.session.progress("apply", step, 0)  # from here on this rank waits for the others of its group

    def _wait_until(self, true: Callable[[], bool]) -> bool:
        deadline_s = time.monotonic() + self.gone_s
        orders = self.session.orders
        while not true():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            orders = self.session.wait(orders.version, left_s)
        return True

    def _without(self, offer: Offer) -> bool:
        """Whether the job is over for this group, or ``offer`` has ended without making it a member."""
        orders = self.session.orders
        now = orders.view.offer
        if now is None:
            return orders.over or not orders.view.is_member
        return orders.over or now.number != offer.number

    def _holds(self, offer: Offer, step: int) -> bool:
        """Whether this group is a member, by ``offer``, and ``step`` is t*."""
        return self._is_there(Joined(step, offer.number), self.session.orders)

    @staticmethod
    def _is_there(held: Joined, orders: Orders) -> bool:
        """Whether these ``orders`` make the group a member, and the state ``held`` is t*."""
        return not orders.over and held.counts_in(orders) and orders.view.committed[0] == held.step

    def _all(self, seen: _Seen, offer: int, step: int) -> bool:
        """Whether all ranks have seen the same of ``step`` of ``offer``, and the offer has not ended. Collective in the
        group."""
        mine = (int(seen), offer, step)
        while True:
            ranks = self.gather(mine)
            if any(one[0] == _Seen.OVER for one in ranks):
                self._leave()
            if any(number > offer for _, number, _ in ranks):
                return False
            here = [one for one in ranks if one[1] == offer]
            if any(one[0] == _Seen.ENDED for one in here):
                return False
            if len(here) == len(ranks):
                assert set(ranks) == {mine}, f"ranks of one group have seen different things of one offer: {ranks}"
                return True
            # the others come to this offer from an older one

    def _leave(self) -> NoReturn:
        """Leave together with the other ranks, who learn of the end too."""
        orders = self.session.orders
        while not orders.over:
            orders = self.session.wait(orders.version)
        mine = (int(_Seen.OVER), 0, 0)
        while any(one != mine for one in self.gather(mine)):
            pass
        raise LeaveError(orders)
