"""The training loop of one rank: wait for the first view, train step by step, save at boundaries, leave when asked.

Everything that a group does together at a step boundary follows from the commit, which all its ranks share (the step,
the members of the epoch in which it was committed, what is to be saved), never from what one rank happens to know.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from spare_megatron.control_plane.session import Session
from spare_megatron.protocol.member import Orders
from spare_megatron.protocol.saves import saver
from spare_megatron.worker.donor import RowDonors
from spare_megatron.worker.engine import StepEngine
from spare_megatron.worker.rank_parts import RankParts
from spare_megatron.worker.saving import Ask
from spare_megatron.worker.step import Committed, Joined, SentBackError, StepRunner
from spare_megatron.worker.ticket_reader import LeaveError


class Saver(Protocol):
    """Writes checkpoints of this rank's group; its methods are collective in the group."""

    def save(self, step: int, epoch: int, ask: Ask, *, since: int, final: bool = False) -> None:
        """Take a checkpoint of ``step``, write and publish it; if ``final``, all of that before this returns.

        ``since`` is the last step at which a save was due: nothing is done where that or a later one is published."""

    def settle(self, tick: Callable[[], None]) -> None:
        """Wait until nothing is being written."""


class Learns(Protocol):
    """How a rank of a group that comes back gets the state of the others."""

    def learn(self) -> Joined:
        """Wait until the group is a member and the engine holds t*; called again when the group was sent back."""


@dataclass
class TrainingLoop:
    """Drives one rank from the first view to the end of the job."""

    engine: StepEngine
    runner: StepRunner
    session: Session
    saver: Saver | None
    first_step: int
    """The step whose state the engine holds at the start."""
    donor: RowDonors
    catch_up: Learns
    parts: RankParts = field(default_factory=RankParts)
    """Takes note of what this rank does when."""
    _save_cost: Mapping[str, float] = field(default_factory=dict, init=False)
    """For how long the last save kept this rank from training; empty once that is reported."""
    _ended: int | None = field(default=None, init=False)
    """The step that ended the run, once it is applied."""
    _voted: int = field(default=0, init=False)
    """The epoch of this rank's newest vote on the weights after the last step."""

    def run(self) -> Orders:
        """Train until the job is over for this rank; returns the orders that say how it ended."""
        try:
            orders = self._wait_for_view()
            joined = None if orders.view.is_member else self.catch_up.learn()
            step = joined.step if joined else self.first_step
            while not self._ends(self.session.orders, step + 1):
                started_s = time.monotonic()
                try:
                    committed = self.runner.run(step + 1, joined)
                except SentBackError:
                    joined = self.catch_up.learn()
                    step = joined.step
                    continue
                joined, step = None, step + 1
                self._apply(committed)
                if committed.leave:
                    return self._end(committed)
                if committed.save and self._saves(committed.live):
                    self._save(committed, time.monotonic() - started_s)
                self.parts.end(step)
        except LeaveError as leave:
            return leave.orders
        return self._until_over()

    def _wait_for_view(self) -> Orders:
        """Wait for the first view: it makes this group a member or, where the job runs already, a learner."""
        orders = self.session.orders
        while not orders.view.epoch and not orders.over:
            orders = self.session.wait(orders.version)
        if orders.over:
            raise LeaveError(orders)
        return orders

    @staticmethod
    def _ends(orders: Orders, step: int) -> bool:
        """Whether the run has ended before ``step``, as in a job attempt that starts at the last step."""
        return orders.view.leave and orders.view.committed[0] < step

    def _apply(self, committed: Committed) -> None:
        self.session.progress("apply", committed.step, 0)
        self.donor.before_apply(self.session.orders.view, committed)
        began_s = time.monotonic()
        report: Mapping[str, Any] = self.engine.apply(committed.step, committed.tensors, committed.scalars)
        if self.runner.shards is not None:
            self.runner.shards.settle(committed.step)  # the closing evaluation applies nothing, and may be saved
        self.parts.note("commit", began_s, time.monotonic())
        self.session.report_step(committed.step, {**report, **self._save_cost})
        self._save_cost = {}

    def _saves(self, live: tuple[int, ...]) -> bool:
        """Whether this rank's group is the one of ``live`` that saves."""
        return self.saver is not None and self.session.orders.view.group == saver(live)

    def _save(self, committed: Committed, step_s: float, final: bool = False) -> None:
        assert self.saver is not None
        began_s, step = time.monotonic(), committed.step
        self.session.progress("checkpoint", step, 0)
        self.runner.inject("checkpoint", step, 0)
        ask = Ask(self.session.saved, lambda: self._tick(step), step_s)
        self.saver.save(step, committed.epoch, ask, since=committed.save, final=final)
        self._tick(step)
        ended_s = time.monotonic()
        self.parts.note("save", began_s, ended_s)
        self._save_cost = {"save_s": round(ended_s - began_s, 6)}

    def _tick(self, step: int) -> None:
        self.session.progress("checkpoint", step, 0)
        self._vote_on_the_end(self.session.orders)

    def _vote_on_the_end(self, orders: Orders) -> None:
        """Vote on the weights after the last step, once in each epoch; also while a save waits, for it is accepted only
        when the votes agree."""
        if self._ended is not None and self._voted < orders.view.epoch and not orders.over:
            self._voted = orders.view.epoch
            self.runner.vote_on_the_end(self._ended, orders.view)

    def _end(self, committed: Committed) -> Orders:
        """End the run after the last step was applied: save it if this group is the one that saves, vote on its
        weights, report that it is applied, and stay until the job is over.

        The group that saves takes its copy before the digest that it votes, as at every other step: the votes then find
        a damage that happens between the two, and it is not in the checkpoint. Should that group die, the lowest group
        of the next view saves. In a newer epoch every group votes again.
        """
        step, saved = committed.step, False
        self.parts.end(step)
        if self.saver is not None:
            self.saver.settle(lambda: self._tick(step))
        self._ended = step
        orders = self.session.orders
        while not orders.over:
            epoch = orders.view.epoch
            if self._saves(orders.view.live_groups) and not saved:
                self._save(committed, 0.0, final=True)
                self.parts.end(step)
                saved = True
            self._vote_on_the_end(self.session.orders)
            self.session.applied(step, epoch)
            while not orders.over and orders.view.epoch == epoch:
                orders = self.session.wait(orders.version)
        return orders

    def _until_over(self) -> Orders:
        orders = self.session.orders
        while not orders.over:
            orders = self.session.wait(orders.version)
        return orders
