"""Simulates the steps of policy 'microbatch', this framework's own: survivors patch a death during a step and reduce
again, and returning groups and standbys are admitted with commits.

A group computes its pieces one after the other, with a speed drawn for this step. With ``balance`` slow groups give
pieces up inside a step, as a model has it, with ``relief`` as the protocol machine decides (``relieved_steps``); with
both those that are slow for long get a smaller share of each step, by the protocol machine's own measure. At a death
it receives how many pieces each group has done; groups compute their pieces of the patch after their own.
The reduction starts when the last live group is done and the communicators are rebuilt, and starts again after a death
during it. A returning group is offered the last committed state and takes it from its donors (``transfers``), while
nobody waits for it; without a transfer it has it at once, and is admitted with the next commit. Where a shard has lost
its last host, groups adopt it, whose pieces wait until they have opened it, or a returning group that hosts it is
called at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spare_megatron.protocol.messages import JobSpec
from spare_megatron.simulator.balance import Completion
from spare_megatron.simulator.node_returns import NodeReturns
from spare_megatron.simulator.policy_trial import PolicyTrial, Returns, job_spec
from spare_megatron.simulator.relieved_steps import RelievedSteps
from spare_megatron.simulator.script import Script
from spare_megatron.simulator.transfers import GRACE_S, Transfers


class PiecesEngine(PolicyTrial):
    """A trial in microbatch granularity, with re-join, standbys, planned restarts, ``balance`` and adoption."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.piece_s = self.cluster.compute_s / self.policy.pieces_per_shard * (1 + self.policy.exact_share)
        self.returns = (
            NodeReturns(self.cluster, self.seed)
            if self.cluster.nodes_per_group
            else Returns(self.policy.standby_groups)
        )
        self.arriving: list[int] = []
        self.leaving = False
        self._transfers = Transfers(self.cluster, self.control) if self.cluster.transfer_s > 0 else None
        self._relief = RelievedSteps(self.control) if self.policy.relief else None
        self._script = Script(self.policy.injections)
        self._copied_s = np.inf
        """When new hosts of state shards have their copies; infinite where there are none."""
        self._after_least_s = 0.0
        """How much later than the least time the pieces of the last step were done, with ``balance``."""

    def _spec(self) -> JobSpec:
        policy = self.policy
        spec = job_spec(policy, self.cluster.num_groups, policy.redundancy, policy.pieces_per_shard, "microbatch")
        copies = policy.state_redundancy or 0
        shards = self.cluster.num_groups if copies else 0
        return replace(spec, adoption=policy.adopt_s is not None, state_shards=shards, state_copies=copies)

    def _members(self) -> list[int]:
        return np.flatnonzero(self.alive).tolist()

    def _away(self) -> float:
        return float((1 - self.alive / self.returns.slowness).sum())

    # ---- a step

    def _step(self) -> bool:
        began, ready = self.now_s, self.now_s
        total = self.control.state.plan.loads()
        per_piece = self.piece_s * self.speeds() * self.returns.slowness
        if self._transfers is not None and self.cluster.donor_share:
            per_piece[self._transfers.serving] *= 1 + self.cluster.donor_share
        finish = began + total * per_piece
        mean_s = float(total[self.alive].mean()) * self.piece_s
        if self.held:
            held, self.held = self.held, []
            if not self._deaths(began, self._hit(held), total, per_piece, finish):
                return False
            ready = began + self.cluster.rebuild_s
        if self._copied_s < np.inf:
            ready = max(ready, self._copied_s)
        if self.policy.injections:
            step, done = self.control.state.step_in_flight, self._reduced(finish, ready, per_piece)
            self.failures.script(self._script.times(step, began, per_piece, done, self.cluster.reduce_s))
        at = began
        while (at := self._next_s(at, total, finish, per_piece, ready)) <= (
            done := self._reduced(finish, ready, per_piece, at)
        ):
            at = max(at, began)
            for group in self.returns.repaired(at):
                self._arrive(group)
            changed = self._take_state(at, finish, ready)
            struck = [group for _, group in self.failures.due(at) if self.returns.strikes(group)]
            hit = self._learners_hit(at, struck)
            dead = self._hit(hit)
            if dead and not self._deaths(at, dead, total, per_piece, finish):
                return False
            if dead or changed:
                ready = at + self.cluster.rebuild_s
            if at >= self._copied_s:
                self._copied_s = np.inf
                self.control.copied(True)
            elif self._copied_s < np.inf:
                ready = max(ready, self._copied_s)
            if self._relief is not None and self._relief.next_s(at, total, finish, per_piece) <= at:
                self._relief.look(at, total, finish, per_piece)
        self.tally.slowest_s += max(0.0, done - self.cluster.reduce_s - began - mean_s)
        self.tally.work += float(total.max()) / self.policy.pieces_per_shard
        self.now_s = done
        self._commit()
        if self.policy.balance or self.policy.relief:
            self.control.measured(per_piece)
        return True

    def _hit(self, groups: list[int]) -> list[int]:
        return self.bury(groups)

    def _next_s(
        self,
        now_s: float,
        total: NDArray[np.int64],
        finish: NDArray[np.float64],
        per_piece: NDArray[np.float64],
        ready: float,
    ) -> float:
        """When the next group dies, is repaired, holds another step, or runs out of pieces."""
        relieved_s = np.inf if self._relief is None else self._relief.next_s(now_s, total, finish, per_piece)
        return min(
            self.failures.first, self.returns.next_s, self._transferred_s(finish, ready), relieved_s, self._copied_s
        )

    def _reduced(
        self, finish: NDArray[np.float64], ready: float, per_piece: NDArray[np.float64], at: float = np.inf
    ) -> float:
        """The time at which the reduction ends if no further group dies; where that is certainly not before ``at``, any
        earlier time that is not before it."""
        last = float(finish.max())
        waited_s = 0.0 if self._transfers is None else self._transfers.waited_for_s()

        def ends(computed_s: float) -> float:
            begins = max(computed_s, ready)
            return max(begins, min(waited_s, begins + GRACE_S)) + self.cluster.reduce_s

        if not self.policy.balance:
            return ends(last)
        standing = self.control.state.standing
        assert standing is not None
        units, where = standing.assignment.units, self.control.state.where
        completion = Completion(finish, per_piece, self.alive, units, where, ready)
        if at <= (least := ends(min(last, completion.least_s))):
            return least
        computed_s = completion.time_s(self._after_least_s)
        self._after_least_s = computed_s - completion.least_s
        return ends(min(last, computed_s))

    # ---- state on its way

    def _transferred_s(self, finish: NDArray[np.float64], ready: float) -> float:
        """When a learner or joiner holds another step, or the grace of joiners ends."""
        if self._transfers is None:
            return np.inf
        over_s = max(float(finish.max()), ready) + GRACE_S
        late = self._transfers.waited_for_s() > over_s
        return min(self._transfers.next_s, over_s if late else np.inf)

    def _take_state(self, at: float, finish: NDArray[np.float64], ready: float) -> bool:
        """Report what learners and joiners hold by now; True where joiners were late and have left the epoch."""
        if self._transfers is None:
            return False
        self._transfers.arrived(at)
        over_s = max(float(finish.max()), ready) + GRACE_S
        late = at >= over_s and self._transfers.waited_for_s() > over_s
        if late:
            self.control.joiners_late(GRACE_S)
            self._follow_members()
        self._transfers.follow(at)
        return late

    def _learners_hit(self, at: float, groups: list[int]) -> list[int]:
        """Those of ``groups`` that are no learners; learners are lost, and begin anew when they are repaired."""
        learners = self.control.state.learners
        hit = [group for group in groups if group in learners and not self.alive[group]]
        if self._transfers is None or not hit:
            return groups
        self.control.learners_lost(hit)
        self.tally.learners_lost += len(hit)
        self._gone(hit, at, struck=True)
        self._transfers.follow(at)
        return [group for group in groups if group not in hit]

    def _gone(self, groups: list[int], at: float, struck: bool) -> None:
        """Learners that are there no more are repaired like any other group."""
        self.arriving = [group for group in self.arriving if group not in groups]
        for group in groups:
            place = self.returns.died(group, at, self.cluster.rejoin_s, struck)
            if place is not None:
                self._arrive(place)

    def _deaths(
        self,
        at: float,
        dead: list[int],
        total: NDArray[np.int64],
        per_piece: NDArray[np.float64],
        finish: NDArray[np.float64],
    ) -> bool:
        """Report deaths to the protocol machine and add the patch to the survivors' ``total`` and ``finish``.

        False after a wipe-out; its dead may return like those of any other death.
        """
        if not dead:
            return True
        control = self.control
        left = np.ceil(np.maximum(finish - at, 0.0) / per_piece - 1e-9).astype(np.int64)
        progress = np.maximum(total - left, 0)
        goes_on = control.lost(dead, _pairs(progress))
        control.drain(dead, undo=True)
        goes_on = goes_on and control.copied(False)
        self._copy(at)
        for group in dead:
            place = self.returns.died(group, at, self.cluster.rejoin_s)
            if place is not None:
                self._arrive(place)
        if not goes_on:
            self.now_s = at
            return False
        self._follow_members()
        away = ~self.alive
        total[away], finish[away] = 0, 0.0
        added = control.state.plan.loads() - total
        some = np.flatnonzero(added > 0)
        if self._transfers is not None:
            self._transfers.follow(at)
            called = sorted(control.state.joiners.intersection(some.tolist()))
            finish[called] = [self._transfers.holds_s(group) for group in called]
        finish[some] = np.maximum(finish[some], at)
        self._adopted(at, some, finish)
        finish[some] += added[some] * per_piece[some]
        total[some] += added[some]
        self.tally.masked += len(dead)
        self.tally.patched += len(some) > 0
        return True

    def _copy(self, at: float) -> None:
        """New hosts of state shards begin to copy; a new epoch has them begin anew."""
        self._copied_s = at + self.cluster.rehost_s if self.control.copying else np.inf

    def _adopted(self, at: float, some: NDArray[np.int64], finish: NDArray[np.float64]) -> None:
        """Those of ``some`` that have adopted a shard begin what they got when they have opened it."""
        opening = sorted({group for group, _ in self.control.opening}.intersection(some.tolist()))
        self.tally.soft_wipe_outs += bool(self.control.opening)
        finish[opening] = np.maximum(finish[opening], at + (self.policy.adopt_s or 0.0))
        self.control.opened()

    def _arrive(self, group: int) -> None:
        """A group is ready to be brought up to date, after a wipe-out in the next job attempt."""
        if self.control.state.stopped is None:
            self.control.returns(group)
        self.arriving.append(group)

    def _commit(self) -> None:
        control = self.control
        if self._transfers is None:
            control.caught_up()
            control.all_voted()
        else:
            control.all_voted(compared=True)
            self._transfers.follow(self.now_s)
        self._follow_members()
        self._leave_for_home()
        self._copy(self.now_s)

    def _leave_for_home(self) -> None:
        """Groups in smaller shapes whose nodes are fit are drained, and are started when they have left."""
        control, going = self.control, self.returns.go_home
        if not going or control.state.phase != "running":
            return
        left = [group for group in sorted(going & control.state.drained) if group not in control.state.live]
        control.drain(left, undo=True)
        self.alive[left] = False
        for group in left:
            self.returns.left(group, self.now_s)
        for group in sorted(going & control.state.live.keys()):
            control.drain([group])

    def _follow_members(self) -> None:
        """Take note of the groups that the protocol machine has made members, and of joiners that it has sent back."""
        state = self.control.state
        if state.phase != "running" or not (self.arriving or state.learners):
            return
        joined = [group for group in self.arriving if group in state.live]
        back = [group for group in state.learners if self.alive[group] and group not in state.live]
        self.alive[joined], self.alive[back] = True, False
        self.tally.joins += len(joined) - len(back)
        self.arriving = [group for group in self.arriving if group not in state.live] + back
        if self._transfers is not None:
            gone = [group for group in self.arriving if group not in state.learners]
            self._gone(gone, self.now_s, struck=False)

    # ---- between the steps

    def _boundary(self) -> None:
        if self.leaving:
            self._planned_restart()
            return
        after = self.policy.restart_after
        lost = self.cluster.num_groups - int(self.alive.sum())
        if after is not None and lost >= after and self.control.state.step_in_flight < self.policy.steps:
            # The step in flight is the last of this job attempt.
            self.control.close(f"{lost} groups are lost")
            self.leaving = True
            return
        self._save_if_due()

    def _planned_restart(self) -> None:
        """Save the last step, which all groups have applied, and start all groups again from it."""
        step = self.control.state.committed[0]
        self.now_s += self.cluster.save_s
        self.tally.save_s += self.cluster.save_s
        self.saved_step, self.saving = step, None
        self.tally.planned_restarts += 1
        self._restart()
        self._whole()
        self._open(step)

    def _whole(self) -> None:
        self.returns.reset()
        if self._transfers is not None:
            self._transfers.reset()
        self.arriving, self.leaving, self._copied_s = [], False, np.inf

    def _recover(self) -> None:
        self._whole()
        super()._recover()


def _pairs(progress: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """(group, pieces done) of the groups that have done any."""
    some = np.flatnonzero(progress)
    return zip(some.tolist(), progress[some].tolist(), strict=True)
