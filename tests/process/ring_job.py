"""A job of groups that are threads of this process, around the real controller and the real replica communicators.

The coordinator is :func:`spare_megatron.protocol.machine.step`, fed with votes that are made from the outcomes of
real reductions; its views and commits come 4 to 20 ms late, to each group for itself. Groups follow
:mod:`spare_megatron.protocol.member`. Between the members lies a :class:`tests.process.relay.Relay`.
"""

from __future__ import annotations

import heapq
import itertools
import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from spare_megatron.collectives.handshake import Identity, Member
from spare_megatron.collectives.reduction import Reduction
from spare_megatron.collectives.replica_communicators import Membership, ReplicaCommunicators
from spare_megatron.placement import build_placement
from spare_megatron.protocol import messages as m
from spare_megatron.protocol.machine import initial_state, step
from spare_megatron.protocol.member import Orders, first_orders, take_commit, take_end, take_view
from tests.process.relay import Relay

NUMEL, BUCKET_BYTES = 256 << 10, 256 << 10
"""1 MB of float32 in four buckets."""
HEARTBEAT_TIMEOUT_S = 5.0


class Later:
    """Calls things at their time, on one thread."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="later")
        self._thread.start()

    def call(self, after_s: float, what: Callable[[], None]) -> None:
        with self._changed:
            heapq.heappush(self._due, (time.monotonic() + after_s, next(self._number), what))
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closing and (not self._due or self._due[0][0] > time.monotonic()):
                    self._changed.wait(self._due[0][0] - time.monotonic() if self._due else None)
                if self._closing:
                    return
                what = heapq.heappop(self._due)[2]
            what()


class Group:
    """A training thread; orders come on another."""

    def __init__(self, job: RingJob, group: int, timeout_s: float) -> None:
        self.job, self.id = job, group
        self.replicas = ReplicaCommunicators(Identity(Member(group)), "gloo", "cpu", timeout_s, BUCKET_BYTES)
        self.orders = first_orders(group, 0)
        self.changed = threading.Condition()
        self._tried = (0, 0)
        """(epoch, step) of the last reduction."""
        self.thread = threading.Thread(target=self._train, name=f"group-{group}")

    def take(self, reported: tuple[Orders, Any]) -> None:
        with self.changed:
            before, self.orders = self.orders, reported[0]
            self.changed.notify_all()
        if self.orders.over:
            self.replicas.abandon()
        elif self.orders.view.epoch > before.view.epoch:
            self.replicas.adopt(self.job.membership(self.orders))

    def _train(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(
                    lambda: self._over() or self._tried < (self.orders.view.epoch, self.orders.view.step)
                )
                view = self.orders.view
            if self._over():
                return
            self._tried = (view.epoch, view.step)
            self._reduce(view)

    def _over(self) -> bool:
        return self.orders.over or self.orders.view.leave

    def _reduce(self, view: m.View) -> None:
        mine = torch.full((NUMEL,), float(self.id + 1))
        request = Reduction((mine,), {"groups": 1.0}, overlapped=self.job.overlapped)
        outcome = self.replicas.reduce(
            view.epoch, request, lambda: self.orders.over or self.orders.view.epoch != view.epoch
        )
        if outcome.stale:
            return
        if outcome.ok:
            expected = float(sum(group + 1 for group in view.live_groups))
            assert torch.equal(outcome.tensors[0], torch.full((NUMEL,), expected)), "a wrong sum"
        pieces = tuple(piece for segment in view.segments for piece in segment)
        self.job.vote(
            m.Vote(
                self.id,
                0,
                m.ReductionResult(view.step, view.epoch, outcome.ok, pieces, links=outcome.links, detail=outcome.error),
            )
        )


class RingJob:
    """All groups, from the first view until the last step is committed."""

    def __init__(self, groups: int, timeout_s: float, steps: int, seed: int, overlapped: bool = False) -> None:
        self.rng = random.Random(seed)
        self.overlapped = overlapped
        self.relay = Relay()
        self.fenced: dict[int, tuple[float, str]] = {}
        """Group -> when the machine decided, and why."""
        self.links: set[m.Link] = set()
        """All that was voted."""
        self.committed_s: dict[int, float] = {}
        self.trace: list[str] = []
        self._later = Later()
        self._changed = threading.Condition()
        self._fronts: dict[tuple[int, int], str] = {}
        """(left, right) -> where the left one is to call the right one."""
        self._failed_s: dict[tuple[object, ...], float] = {}
        spec = m.JobSpec(
            groups, 2, build_placement(groups, 2).offsets, "microbatch", 0, steps, 1, "job", HEARTBEAT_TIMEOUT_S
        )
        self.last_step = steps
        self.state = initial_state()
        self.groups = [Group(self, group, timeout_s) for group in range(groups)]
        for group in self.groups:
            group.thread.start()
        self._feed(m.Opened(spec, 1, 1))
        for group in range(groups):
            self._feed(m.Hello(group, 0, "job", 0))

    def membership(self, orders: Orders) -> Membership:
        """With the relay's front instead of the neighbour's own address."""
        view = orders.view
        members = tuple(Member(*one) for one in view.live)
        if view.neighbour is None:
            return Membership(view.epoch, members)
        left, right = view.group, view.neighbour[0]
        with self._changed:
            if (left, right) not in self._fronts:
                self._fronts[left, right] = self.relay.front(left, right, self.groups[right].replicas.address)
            return Membership(view.epoch, members, self._fronts[left, right])

    def vote(self, vote: m.Vote) -> None:
        now_s = time.monotonic()
        with self._changed:
            result = vote.result
            self.links.update(result.links)
            if not result.ok:
                key = (result.step, tuple(self.state.live))
                vote = replace(vote, failing_s=now_s - self._failed_s.setdefault(key, now_s))
            self._feed(vote)

    def wait_for(self, true: Callable[[], bool], within_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: true() or bool(self.state.stopped), within_s) and true()

    def finished(self) -> bool:
        return self.state.committed[0] == self.last_step

    def close(self) -> None:
        for group in self.groups:
            group.take(take_end(group.orders, stop=("left", "the test ends")))
        for group in self.groups:
            group.thread.join()
            group.replicas.close()
        self._later.close()
        self.relay.close()

    def _feed(self, event: m.Event) -> None:
        with self._changed:
            self.state, decision = step(self.state, event)
            self.trace.append(f"{time.monotonic():.3f} {decision.reason}")
            for action in decision.actions:
                self._act(action)
            self._changed.notify_all()

    def _act(self, action: m.Action) -> None:
        if isinstance(action, m.SendView):
            view, group = action.view, self.groups[action.view.group]
            self._send(group, lambda: take_view(group.orders, view), action.delay_s)
        elif isinstance(action, m.SendCommit):
            self.committed_s[action.step] = time.monotonic()
            for member in action.groups:
                self._send(self.groups[member], self._commit(self.groups[member], action))
        elif isinstance(action, m.SendFenced):
            self.fenced.setdefault(action.group, (time.monotonic(), action.reason))
            group = self.groups[action.group]
            self._send(group, lambda: take_end(group.orders, fenced=action.reason))

    def _commit(self, group: Group, action: m.SendCommit) -> Callable[[], Any]:
        return lambda: take_commit(group.orders, action.step, action.epoch, action.leave, audits=(), save=action.save)

    def _send(self, group: Group, change: Callable[[], Any], delay_s: float = 0.0) -> None:
        self._later.call(delay_s + self.rng.uniform(0.004, 0.020), lambda: group.take(change()))
