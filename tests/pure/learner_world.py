"""The ranks of a group that comes back, with the real training loop, step runner and learner, around the real machine.

Group 0 is one rank that votes as soon as it may, and mostly waits for a learner that is far behind; so is group 2,
where there are three, until it dies: then group 1 is called as the last host of a shard. Group 1 was lost, and its
ranks are threads: each receives the orders of the machine late, at moments of its own, so that of two orders which
follow each other quickly it may see the second only. What an engine does together with the other ranks of its group is
a rendezvous here, at which all must do the same: ranks that come apart are found, and ranks that hang are found by the
time-out of the rendezvous.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from spare_megatron.collectives.reduction import ReduceOutcome
from spare_megatron.control_plane.group_aggregation import Ballots, MinOverRanks, joined_digests
from spare_megatron.control_plane.learner_reports import LearnerReports
from spare_megatron.control_plane.reports import RankBegun, RankCaughtUp, RankReady, RankVoid, Reduced
from spare_megatron.control_plane.ticket_issuer import TicketIssuer
from spare_megatron.protocol import messages as m
from spare_megatron.protocol.machine import step as decide
from spare_megatron.protocol.member import Orders, first_orders, take_commit, take_end, take_tickets, take_view
from spare_megatron.protocol.offers import VOIDS_MAX
from spare_megatron.protocol.state import State
from spare_megatron.protocol.tickets import Tickets, TicketStream
from spare_megatron.protocol.view import View
from spare_megatron.transfer.transport import FetchError, FetchOverError, GoneError, SnapshotShard
from spare_megatron.worker.catch_up import CatchUp
from spare_megatron.worker.loop import TrainingLoop
from spare_megatron.worker.step import StepRunner

LATEST_S = 0.004
"""The most by which an order is late at a rank, and by which a word of a rank is late at the machine."""
HANGS_S = 10.0
SPEC = m.JobSpec(
    num_groups=2,
    pieces_per_shard=2,
    offsets=(0, 1),
    granularity="microbatch",
    first_step=0,
    last_step=14,
    min_groups=1,
    fingerprint="f",
)
THREE = replace(SPEC, num_groups=3)
"""Shards 1 and 2 are on two groups each, of which group 1 is one."""
BACK = (1, 1)
"""The group that comes back, and its incarnation."""


class Rendezvous:
    """The group's collectives: all ranks give something, and get what all have given."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size)
        self._given: list[Any] = [None] * size

    def of(self, position: int) -> Callable[[Any], list[Any]]:
        def gather(mine: Any) -> list[Any]:
            self._given[position] = mine
            self._barrier.wait(HANGS_S)
            there = list(self._given)
            self._barrier.wait(HANGS_S)
            return there

        return gather


class RankEngine:
    """Holds a step and no weights."""

    def __init__(self, gather: Callable[[Any], list[Any]]) -> None:
        self._gather, self.step, self._tensor = gather, -1, torch.zeros(1)
        self.on_piece: Any = None

    def _together(self, *what: Any) -> None:
        there = self._gather(what)
        assert all(one == what for one in there), f"the ranks of a group came apart: {there}"

    def begin_step(self, step: int) -> None:
        if self.step < 0:
            return  # it warms up
        assert step == self.step + 1, f"step {step} begins on the state of step {self.step}"

    def run(self, step: int, tickets: Tickets) -> None:
        self._together("run", step)
        for ticket in tickets:
            self._together(step, ticket.piece, ticket.audited)

    def local_sum(self) -> list[torch.Tensor]:
        self._together("sum", self.step)
        return [self._tensor]

    sums = 1

    def rows(self) -> Any:
        return (self,)

    def conversion(self) -> None:
        return None

    def scalars(self) -> Mapping[str, float]:
        return {}

    def apply(self, step: int, reduced: Any, scalars: Mapping[str, float]) -> Mapping[str, Any]:
        self._together("apply", step)
        assert step == self.step + 1 == scalars["step"], (step, self.step, scalars)
        self.step = step
        return {}

    def state_tensors(self) -> Mapping[str, torch.Tensor]:
        return {"state": self._tensor}

    def adopt_state(self, step: int, values: Mapping[str, Any]) -> None:
        assert values["step"] == step
        self.step = step

    def weights_digest(self) -> str:
        return weights(self.step)

    def result_digest(self, tensors: Any, scalars: Any) -> str:
        return "r"

    def result_fault(self, tensors: Any) -> str:
        return ""

    def accumulators_fault(self, *, suspected: bool) -> str:
        return ""

    def weights_checksums(self) -> str:
        return ""

    def piece_checksums(self, audited: bool) -> Mapping[int, Mapping[str, int]]:
        return {}


def weights(step: int) -> str:
    return f"w{step}"


class RankSession:
    """One rank's session: orders come late, and its words go to the world."""

    def __init__(self, world: LearnerWorld, position: int) -> None:
        self.spec, self.position, self._world = world.spec, position, world
        self.rows = (position,)
        self._changed, self.orders = threading.Condition(), first_orders(*BACK)
        self._random = random.Random(world.seed * 10 + position)
        self._coming: queue.Queue[m.Action | TicketStream | None] = queue.Queue()
        self._thread = threading.Thread(target=self._deliver, daemon=True)
        self._thread.start()

    def send(self, order: m.Action | TicketStream | None) -> None:
        self._coming.put(order)

    def _deliver(self) -> None:
        while (order := self._coming.get()) is not None:
            if self._random.random() < 0.5:
                time.sleep(self._random.uniform(0, LATEST_S))
            with self._changed:
                self.orders = taken(self.orders, order)
                self._changed.notify_all()

    def wait(self, version: int, timeout_s: float | None = None) -> Orders:
        with self._changed:
            there = self._changed.wait_for(lambda: self.orders.version > version, timeout_s or HANGS_S)
            assert there or timeout_s, f"rank {self.position} waits for ever: {self.orders}"
            return self.orders

    tickets_low = 0

    def read_tickets(self, number: int) -> None:
        pass

    def begun(self, number: int) -> None:
        if self.position == 0:
            self._world.announce(0, RankBegun(number))

    def progress(self, phase: str, step: int, pieces_done: int) -> None:
        pass

    def ready(self) -> None:
        self._world.announce(self.position, RankReady())

    def caught_up(self, number: int, step: int, digest: str, row: int | None = None) -> None:
        self._world.announce(self.position, RankCaughtUp(number, step, digest, self.position if row is None else row))

    def void(self, number: int, detail: str) -> None:
        self._world.announce(self.position, RankVoid(number, detail))

    def reduced(self, result: m.ReductionResult, figures: Any = None, row: int | None = None) -> None:
        self._world.announce(self.position, Reduced(result))

    def applied(self, step: int, epoch: int) -> None:
        self._world.announce(self.position, (step, epoch))

    def report_step(self, step: int, report: Any) -> None:
        pass


def taken(orders: Orders, order: m.Action | TicketStream) -> Orders:
    """A rank's orders after one more, by the member's rules."""
    if isinstance(order, TicketStream):
        return take_tickets(orders, order)[0]
    if isinstance(order, m.SendView):
        at = ("",) * len(order.view.offer.donors) if order.view.offer else ()
        return take_view(orders, order.view, "", at)[0]
    if isinstance(order, m.SendCommit):
        return take_commit(orders, order.step, order.epoch, order.leave, audits=(), save=order.save)[0]
    if isinstance(order, m.SendFenced):
        return take_end(orders, fenced=order.reason)[0]
    assert isinstance(order, m.SendStop)
    return take_end(orders, stop=(order.outcome, order.reason))[0]


class RankReplicas:
    """Sums at once, unless the epoch is over."""

    def __init__(self, session: RankSession) -> None:
        self._session = session

    def reduce(self, epoch: int, request: Any, stale: Callable[[], bool]) -> ReduceOutcome:
        if stale():
            return ReduceOutcome(ok=False, stale=True)
        step = self._session.orders.view.step
        return ReduceOutcome(ok=True, stale=False, tensors=(torch.zeros(1),), scalars={"step": float(step)})


class RankTransport:
    """Has the state and every committed result, some time later; fails now and then."""

    def __init__(self, world: LearnerWorld, position: int) -> None:
        self._world, self._random = world, random.Random(world.seed * 10 + position + 5)

    def fetch(self, number: int, step: int, sources: Any, place: Any, over: Callable[[], bool]) -> SnapshotShard:
        until_s = time.monotonic() + HANGS_S
        while True:
            assert time.monotonic() < until_s, f"the snapshot shard of step {step} of offer {number} does not come"
            time.sleep(self._random.uniform(0, LATEST_S))
            if over():
                raise FetchOverError
            state = self._world.state
            serves = {offer.number: offer for offer in state.offers}
            if self._world.faults.pop("fetch", None):
                raise FetchError("it was damaged twice")
            if number not in serves:
                raise GoneError("it is gone")
            if step <= state.committed[0]:
                break
        values = {"step": step, "scalars": {"step": float(step)}}
        return SnapshotShard(place(SnapshotShard({"state": torch.zeros(1)}, values)), values)


class NoDonor:
    def look(self, view: View, step: int) -> None:
        pass

    before_apply = look


class LearnerWorld:
    """One machine, group 0, perhaps group 2, and ``size`` ranks of group 1."""

    def __init__(self, size: int, seed: int, spec: m.JobSpec = SPEC) -> None:
        self.size, self.seed, self.random, self.spec = size, seed, random.Random(seed), spec
        self.faults: dict[str, bool] = {}
        self.state, self._lock = State(), threading.RLock()
        self._reports, self._ballots = LearnerReports(BACK, size, size), Ballots(*BACK, size)
        self._issuer = TicketIssuer(spec, late_pauses=seed % 2 == 1)
        self._applied = MinOverRanks(size, (-1, -1))
        self._view = first_orders(*BACK)
        self._members = {group: first_orders(group, 0) for group in range(spec.num_groups) if group != BACK[0]}
        self.sessions: list[RankSession] = []
        self.reasons: list[str] = []
        self._under_way: list[m.Event] = []
        """Words of group 1 that the machine has not received yet."""
        self._voids = 0
        self._failed: list[BaseException] = []

    def run(self) -> list[int]:
        """Play to the end; returns the step that each rank holds then."""
        meeting = Rendezvous(self.size)
        self.sessions = [RankSession(self, position) for position in range(self.size)]
        engines = [RankEngine(meeting.of(position)) for position in range(self.size)]
        ranks = [threading.Thread(target=self._rank, args=(p, engines[p], meeting.of(p))) for p in range(self.size)]
        self.event(m.Opened(self.spec, 1, 1))
        for group in range(self.spec.num_groups):
            self.event(m.Hello(group, 0, SPEC.fingerprint, 0))
        self.event(m.Lost((m.Loss(1, 0, "exited"),)))
        self.event(m.Hello(*BACK, SPEC.fingerprint, 0))
        for rank in ranks:
            rank.start()
        deadline_s = time.monotonic() + 3 * HANGS_S
        while not self.state.stopped and not self._failed and time.monotonic() < deadline_s:
            time.sleep(self.random.uniform(0, 2 * LATEST_S))
            self._receive_group_1()
            for group in tuple(self._members):
                self._play(group)
            self._disturb()
        for rank in ranks:
            rank.join(2 * HANGS_S)
        for session in self.sessions:
            session.send(None)
        if self._failed:
            raise self._failed[0]
        assert not any(rank.is_alive() for rank in ranks), "ranks hang"
        assert self.state.stopped, f"the job does not end: {self.reasons[-3:]}"
        return [engine.step for engine in engines]

    def _rank(self, position: int, engine: Any, gather: Any) -> None:
        session: Any = self.sessions[position]
        transport: Any = RankTransport(self, position)
        catch_up = CatchUp(engine, session, transport, gather, torch.device("cpu"), HANGS_S, _no_fault)  # type: ignore[arg-type]
        runner = StepRunner(engine, session, RankReplicas(session), _no_fault, gather=gather)  # type: ignore[arg-type]
        try:
            TrainingLoop(engine, runner, session, None, 0, NoDonor(), catch_up).run()  # type: ignore[arg-type]
        except BaseException as error:
            self._failed.append(error)

    def event(self, event: m.Event) -> None:
        """Decide one event, and send the actions."""
        with self._lock:
            self.state, decision = decide(self.state, event)
            self.reasons.append(decision.reason)
            for action in decision.actions:
                self._send(action)

    def _send(self, action: m.Action) -> None:
        for group in (*self._members, BACK[0]):
            if isinstance(action, m.SendView | m.SendFenced):
                there = (action.view.group if isinstance(action, m.SendView) else action.group) == group
            else:
                there = group in action.groups if isinstance(action, m.SendCommit | m.SendStop) else False
            if not there:
                continue
            if group in self._members:
                self._members[group] = taken(self._members[group], action)
                continue
            self._view = taken(self._view, action)
            words = self._issuer.reported(self._view.view, self._view.over)
            for order in (words, action) if self._view.over else (action, words):
                self._tell(order)
            ready = self._reports.reported(self._view.view)
            if ready is not None:
                self._under_way.append(ready)

    def _tell(self, order: m.Action | TicketStream) -> None:
        """Tell the ranks of group 1."""
        for session in self.sessions:
            session.send(order)

    def announce(self, position: int, word: Any) -> None:
        """A rank of group 1 says something to its leader."""
        with self._lock:
            reported: Any = None
            if isinstance(word, RankBegun):
                self._tell(self._issuer.begun(word.number))
            elif isinstance(word, Reduced):
                ballot = self._ballots.add(position, word)
                reported = ballot[0] if ballot else None
            elif isinstance(word, tuple):
                if self._applied.add(position, word):
                    reported = m.Applied(*BACK, *self._applied.reached)
            else:
                reported = self._reports.receive(position, word)
            if reported is not None:
                self._under_way.append(reported)
            if isinstance(reported, m.Void) and self.random.random() < 0.5:
                self._receive_all_but_the_last()
                self._die()

    def _receive_all_but_the_last(self) -> None:
        while len(self._under_way) > 1:
            self.event(self._under_way.pop(0))

    def _die(self) -> None:
        """Group 2 dies, where group 1 could stand in for it."""
        known = self.state.learners.get(BACK[0])
        if 2 in self._members and known and known.formed and self.state.phase == "running":
            del self._members[2]
            self.event(m.Lost((m.Loss(2, 0, "exited"),)))

    def _receive_group_1(self) -> None:
        """Some of its words arrive, in order."""
        with self._lock:
            while self._under_way and self.random.random() < 0.7:
                self.event(self._under_way.pop(0))

    def _play(self, group: int) -> None:
        """A group of one rank votes for the step in flight, or does what is asked at the end of the run."""
        with self._lock:
            view, state = self._members[group].view, self.state
            known = next(iter(state.learners.values()), None)
            behind = known and (known.applied < state.committed[0] or not (known.ready or known.offer))
            if behind and state.phase == "running" and self.random.random() < 0.995:
                return
            if state.stopped or group in state.votes:
                if state.phase == "ending" and group not in state.applied_last:
                    self.event(m.Applied(group, 0, *state.committed))
                return
            pieces = tuple(piece for segment in view.segments for piece in segment)
            of_result = "" if view.leave else joined_digests(["r"] * self.size)
            of_weights = joined_digests([weights(view.committed[0])] * self.size)
            result = m.ReductionResult(view.step, view.epoch, True, pieces, of_result, of_weights)
            self.event(m.Vote(group, 0, result))

    def _disturb(self) -> None:
        """What may go wrong, a few times in all."""
        with self._lock:
            kind = self.random.choice(("withdraw", "late", "late", "late", "fetch", "standstill", "die", *[""] * 6))
            offer, ends = next(iter(self.state.offers), None), self.state.committed[0] > SPEC.last_step - 6
            if kind == "standstill" and self.state.phase == "running":
                self.event(m.Standstill(self.state.epoch, "all wait", 0.0))
            if kind == "die" and self.state.committed[0] > SPEC.last_step - 8:
                self._die()
            if ends or self._voids == VOIDS_MAX - 1:
                return
            self._voids += 1
            if kind == "withdraw" and offer is not None:
                self.event(m.Withdrawn(*offer.donors[0], offer.number, "it keeps too much"))
            elif kind == "late" and self.state.joiners:
                self.event(m.JoinersLate(self.state.epoch, 1.0))
            elif kind == "fetch" and not self.faults:
                self.faults["fetch"] = True
            else:
                self._voids -= 1


def _no_fault(point: str, step: int, n: int) -> None:
    pass
