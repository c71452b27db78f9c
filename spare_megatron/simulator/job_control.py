"""Feeds the events of a modelled cluster into the real machine, ``protocol.machine``.

Nothing is decided here. ``JobControl`` keeps the machine's state and makes the events; with ``check`` it tests every
invariant after each event.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from spare_megatron.protocol import messages as m
from spare_megatron.protocol.invariants import check as check_invariants
from spare_megatron.protocol.lasting_paces import LastingPaces
from spare_megatron.protocol.learner import NO_OFFER
from spare_megatron.protocol.machine import State, initial_state, step
from spare_megatron.protocol.view import COUNTS, NEW, WHOLE

FINGERPRINT = "simulated"


def weights_digest(step: int) -> str:
    """Stands for the digest of the weights after a step."""
    return f"weights after {step}"


class JobControl:
    """One job over all its job attempts."""

    def __init__(self, spec: m.JobSpec, check: bool = False) -> None:
        self.spec = replace(spec, fingerprint=FINGERPRINT)
        self.state: State = initial_state()
        self.check = check
        self.events = 0
        self._lasting = LastingPaces()

    def feed(self, event: m.Event) -> m.Decision:
        """Pass one event to the machine, keep the new state and return the decision."""
        before = self.state
        self.state, decision = step(before, event)
        self.events += 1
        if self.check:
            check_invariants(before, event, self.state, decision)
        return decision

    # ---- a job attempt

    def open(self, first_step: int, groups: Sequence[int]) -> None:
        """Begin a new job attempt at ``first_step`` with these groups."""
        state = self.state
        self.spec = replace(self.spec, first_step=first_step)
        self.feed(m.Opened(self.spec, state.job_attempt + 1, state.fencing + 1))
        incarnation = max(state.highest.values(), default=-1) + 1
        self.feed(m.AllHere(tuple((group, incarnation) for group in groups)))
        if self.state.phase == "forming":
            self.feed(m.StartupOver(0.0))

    def close(self, why: str) -> None:
        """Ask for the end of this job attempt: it ends when the step in flight is committed and applied by all."""
        self.feed(m.StopRequested(why))

    # ---- inside a step

    def all_voted(self, compared: bool = False) -> None:
        """Every live group votes ok for its plan; ``compared``: with a digest of the weights."""
        state, at = self.state, self.state.step_in_flight
        digest = weights_digest(at - 1) if compared else ""
        if not state.state_hosts:
            self.feed(m.AllVoted(at, state.epoch, digest))
            return
        for group in sorted(state.live):
            pieces = tuple(piece for segment in state.segments_of(group) for piece in segment)
            hosts = (host for host in state.state_hosts if host.group == group)
            kept = tuple((host.shard, 0) for host in hosts if host.standing in (COUNTS, WHOLE))
            result = m.ReductionResult(at, state.epoch, True, pieces, weights_digest=digest, state=kept)
            self.feed(m.Vote(group, state.live[group], result))

    def measured(self, piece_s: NDArray[np.float64]) -> None:
        """Report how many seconds each group, [N], took for a piece in the step that was committed last."""
        known = piece_s.tolist()
        event = self._lasting.committed(self.state, {group: known[group] for group in self.state.live})
        if event is not None:
            self.feed(event)

    def lost(self, groups: Iterable[int], progress: Iterable[tuple[int, int]] = ()) -> bool:
        """Report that these groups died, with the pieces that each live group has computed (group, pieces).

        False when this job attempt ends, because it was a wipe-out.
        """
        live = self.state.live
        losses = tuple(m.Loss(group, live[group], "exited") for group in groups)
        self.feed(m.Lost(losses, tuple(progress)))
        return self.state.stopped is None

    @property
    def opening(self) -> list[tuple[int, int]]:
        """(group, shard) of the adopted shards that are not open yet."""
        adopted = self.state.adopted.items()
        return [(group, shard) for group, shards in adopted for shard, is_open in shards.items() if not is_open]

    def opened(self) -> None:
        """Report that groups have opened the shards that they adopted."""
        for group, shard in self.opening:
            self.feed(m.Hosts(group, self.state.live[group], shard, True))

    @property
    def copying(self) -> bool:
        """Whether a new host of a state shard does not have it yet."""
        return any(host.standing == NEW for host in self.state.state_hosts)

    def copied(self, all_of_them: bool) -> bool:
        """Report of new hosts of state shards that their donors are gone or, ``all_of_them``, that the others have what
        they were given. False when this job attempt ends, because no copy of a shard is left."""
        for host in self.state.state_hosts:
            if host.standing == NEW and (all_of_them or host.donor is None):
                self.feed(m.Have(*host.member, self.state.epoch, host.shard, host.donor is not None))
        return self.state.stopped is None

    def returns(self, group: int) -> None:
        """Report that a group is back and could be brought up to date."""
        incarnation = self.state.highest.get(group, -1) + 1
        self.feed(m.Hello(group, incarnation, FINGERPRINT, self.spec.first_step))
        self.feed(m.Ready(group, incarnation))

    def caught_up(self) -> None:
        """Report that all learners and joiners with an offer now hold the committed state, and that the others could
        take one."""
        for group, known in sorted(self.state.learners.items()):
            gathered = bool(self.state.job.state_shards) and group in self.state.live
            if known.offer is not None or gathered:
                number = known.offer.number if known.offer is not None else NO_OFFER
                self.feed(m.CaughtUp(group, known.incarnation, number, self.state.committed[0]))
            elif not known.ready:
                self.feed(m.Ready(group, known.incarnation))

    def ready(self) -> None:
        """Report that learners whose offers have ended could take another one."""
        for group, known in sorted(self.state.learners.items()):
            if known.offer is None and not known.ready:
                self.feed(m.Ready(group, known.incarnation))

    def drain(self, groups: Iterable[int], undo: bool = False) -> None:
        """Ask that groups leave with the next commit, one that nothing can do without stays; or take that back from
        those that were asked."""
        some = [group for group in groups if (group in self.state.drained) == undo]
        if some:
            self.feed(m.DrainRequested(tuple(some), "all nodes of the home shape are fit", undo))

    def learners_lost(self, groups: Iterable[int]) -> None:
        """Report that these groups died while they learned."""
        learners = self.state.learners
        self.feed(m.Lost(tuple(m.Loss(group, learners[group].incarnation, "exited") for group in groups)))

    def holds(self, group: int, step: int) -> None:
        """Report that a learner or joiner holds the state after a step by its offer."""
        known = self.state.learners[group]
        assert known.offer is not None, "a transfer ends with its offer"
        self.feed(m.CaughtUp(group, known.incarnation, known.offer.number, step, weights_digest(step)))

    def too_slow(self, group: int) -> None:
        """Report that a donor of this learner keeps too many results for it and withdraws."""
        offer = self.state.learners[group].offer
        assert offer is not None, "a transfer ends with its offer"
        self.feed(m.Withdrawn(*offer.donors[0], offer.number, "the learner cannot keep up with the steps"))

    def joiners_late(self, waited_s: float) -> None:
        """Report that the holders have waited for joiners for their grace time."""
        self.feed(m.JoinersLate(self.state.epoch, waited_s))
