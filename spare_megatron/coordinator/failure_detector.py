"""Finds groups that are dead or must be taken for dead, from the beats of groups, connections and progress counters.

Pure: the time, by the coordinator's own clock, comes in as an argument. The rules are those of protocol rule 11. A
group is lost when it exits; when its connection stays closed for the grace time without the same incarnation coming
back; when a rank is silent for the heartbeat time-out; and when it stands still for the progress time-out while others
wait for it. Where all groups wait for each other and none is behind, none is lost: the attempt has failed and is made
again (:meth:`Detector.standstill`). Where nobody waits for another group, because there is no other or all have
hung while they compute, all are lost when none has moved for much longer: the job itself waits for them.

Ranks are not known here. The beat of a group (:mod:`spare_megatron.control_plane.rank_ledger`) names the two that
decide: the one that is furthest behind and the one that has been silent for longest, each with a duration.

The coordinator itself may be stopped or get no CPU time. Nobody is judged for time in which it did not look: all times
are by a clock that stands still meanwhile, and a duration that a leader tells does not reach back over a pause.

A tick in which nothing can be due costs O(1), another one O(groups): heartbeats put deadlines off, unless they name
another rank, so the earliest deadline at the last look, and of ranks named since, is a bound.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from spare_megatron.config.timeouts import Timeouts
from spare_megatron.control_plane.reports import PHASE_ORDER, PHASES, WAITING, Heartbeat
from spare_megatron.coordinator.watched_group import GroupStanding, JudgedPlace, WatchedGroup
from spare_megatron.protocol.messages import Loss
from spare_megatron.runtime.awake_clock import AwakeClock

TICKS_PER_INTERVAL = 4
"""Number of ticks in one heartbeat interval; deadlines are checked at each tick."""
GAP_TICKS = 2
"""How many ticks may lie between two things that the coordinator receives or does, before it counts as a pause."""


@dataclass(frozen=True)
class Finding:
    """A loss, and the time of the first evidence for it."""

    loss: Loss
    since_s: float


@dataclass(frozen=True)
class Attempt:
    """The attempt at the step in flight whose progress is judged."""

    epoch: int
    members: Mapping[int, int]
    """Group -> incarnation."""
    voted: Collection[int] = ()
    """Groups whose vote of this epoch counts; at the end of the run those that have done all that is asked of them.
    They wait for the others."""
    joiners: Collection[int] = ()
    """Members that take the state from others, and wait for these."""


class Detector:
    """Watches the present incarnation of each group."""

    def __init__(self, timeouts: Timeouts, now_s: float) -> None:
        self._times = timeouts
        self._groups: dict[int, WatchedGroup] = {}
        self._members: Mapping[int, int] = {}
        self._epoch, self._epoch_began_s = 0, now_s
        self._ticked_s = self._epoch_after_s = now_s
        """The last tick, and the last one before the present epoch was seen: nobody began its attempt sooner."""
        self._clock = AwakeClock(now_s, GAP_TICKS * self.tick_s)
        self._due_s = self._still_due_s = -math.inf
        """Nobody can be silent or closed for too long, or stand still for too long, before these times."""

    @property
    def tick_s(self) -> float:
        """The interval at which :meth:`tick` should be called."""
        return self._times.heartbeat_interval_s / TICKS_PER_INTERVAL

    @property
    def heartbeat_timeout_s(self) -> float:
        """The time of silence after which a rank counts as dead."""
        return self._times.heartbeat_timeout_s

    def at_s(self, now_s: float) -> float:
        """``now_s`` by the detector's clock, which stands still while this process does."""
        return self._clock.at(now_s)

    @property
    def startup_timeout_s(self) -> float:
        """The time that a group has to get ready."""
        return self._times.startup_timeout_s

    def adopt(self, timeouts: Timeouts) -> None:
        """Use the time-outs of the job, once they are known."""
        self._times = timeouts
        self._clock.gap_s = GAP_TICKS * self.tick_s
        self._due_s = self._still_due_s = -math.inf

    # ------------------------------------------------------------------------------------------------ what is received

    def expect(self, group: int, incarnation: int, now_s: float) -> None:
        """Watch a member that is known from the journal only: it must send Hello within the heartbeat time-out."""
        self._begin(group, incarnation, 1, self._clock.at(now_s))

    def hello(self, group: int, incarnation: int, ranks: int, now_s: float) -> None:
        """A group sends Hello, for the first time or again."""
        at_s, known = self._clock.at(now_s), self._groups.get(group)
        if known is not None and known.incarnation > incarnation:
            return
        if known is None or known.incarnation != incarnation or known.lost:
            known = self._begin(group, incarnation, ranks, at_s)
        known.size = ranks
        self._receive_all(known, at_s)

    def heartbeat(self, group: int, incarnation: int, beat: Heartbeat, now_s: float) -> None:
        """A leader's heartbeat came."""
        at_s, known = self._clock.at(now_s), self._present(group, incarnation)
        if known is None:
            return
        known.received_s, known.waiting, known.done = at_s, beat.waiting, (beat.step, beat.pieces_done)
        late, last = beat.late, beat.last
        # What a leader tells may reach back over a pause of this process. So of a rank that was known already the time
        # that was known counts, and another one's reaches back to the pause at most.
        if late is None:
            known.late = None
        else:
            same = known.late is not None and known.late[0] == late.position
            earliest_s = known.late[1] if known.late and same else max(self._clock.woke_s, known.silence_from_s)
            known.late = late.position, max(at_s - late.silent_s, earliest_s)
            self._due_s = min(self._due_s, known.late[1] + self._times.heartbeat_timeout_s)
        if last is not None:
            same = known.last is not None and (known.last.position, known.last.counter) == (last.position, last.counter)
            earliest_s = known.moved_s if same else self._clock.woke_s
            known.last, known.moved_s = last, max(at_s - last.still_s, earliest_s)
            self._still_due_s = min(self._still_due_s, known.stood_since_s + self._times.progress_timeout_s)

    def closed(self, group: int, incarnation: int, now_s: float, position: int | None = None) -> None:
        """The present connection of a group (``position`` None) or of one of its ranks closed."""
        at_s, known = self._clock.at(now_s), self._present(group, incarnation)
        if known is None:
            return
        if position is None:
            known.closed_s = at_s
        elif 0 <= position < known.size:
            known.closed_ranks[position] = at_s
        self._due_s = min(self._due_s, at_s + self._times.grace_s)

    def opened(self, group: int, incarnation: int, position: int, now_s: float) -> None:
        """A rank is connected to its leader again."""
        self._clock.at(now_s)
        known = self._present(group, incarnation)
        if known is not None:
            known.closed_ranks.pop(position, None)
            if known.late is not None and known.late[0] == position:
                known.late = None

    def lost(self, group: int, incarnation: int) -> bool:
        """The group is known to be gone, for example because it exited. False where that was known already, or a newer
        incarnation has come. A newer one that has not sent Hello does not end the watch of one that has."""
        known = self._groups.get(group)
        if known is not None and (known.incarnation > incarnation or (known.incarnation == incarnation and known.lost)):
            return False
        if known is not None and known.incarnation < incarnation and not known.lost:
            return True
        self._begin(group, incarnation, known.size if known is not None else 1, -math.inf).lost = True
        return True

    # ----------------------------------------------------------------------------------------------- what is decided

    def tick(self, now_s: float, attempt: Attempt | None = None) -> list[Finding]:
        """Losses that are due now, each returned once. The members of ``attempt`` are judged for progress too; it is
        None while the job does not train."""
        at_s = self._clock.at(now_s)
        found = self._due(at_s)
        if found:
            # Losses that would be found at the next tick mostly have the same cause: they go into the same epoch.
            found = self._due(at_s + self.tick_s)
        if attempt is None:
            self._members, self._epoch = {}, 0  # standing still before or in this time does not count
        elif not found:
            self._follow(attempt, at_s)
            found = self._stalled(attempt, at_s)
            if found:
                self._begin_progress(attempt.members, at_s)
        for finding in found:
            self._groups[finding.loss.group].lost = True
        self._ticked_s = at_s
        return found

    def standstill(self, now_s: float, attempt: Attempt) -> str:
        """Why the present attempt cannot end although nobody is to blame: all ranks have waited for each other at the
        same place for the progress time-out. Empty where that is not so. Called after :meth:`tick`, with the same
        time."""
        at_s = self._clock.at(now_s)
        self._follow(attempt, at_s)
        if attempt.voted or at_s <= self._still_due_s:
            return ""
        places = self._places(attempt)
        if len(places) < len(attempt.members) or len({one.at for one in places.values()}) != 1:
            return ""
        rank = min(places.values(), key=lambda one: one.rank.position).rank
        still_s = min(self._still_s(one.since_s, at_s) for one in places.values())
        if rank.phase not in WAITING or still_s <= self._times.progress_timeout_s:
            return ""
        return (
            f"all {len(places)} groups have waited for each other in step {rank.step}, {rank.phase}, for "
            f"{still_s:.2f} s; the time-out is {self._times.progress_timeout_s:g} s"
        )

    def all_wait(self, groups: Iterable[int]) -> bool:
        """True when every rank of these groups waits for other groups."""
        known = (self._groups[group] for group in groups if group in self._groups)
        return all(one.waiting >= one.size for one in known)

    def spare(self, group: int, now_s: float) -> None:
        """The machine did not act on a loss that was found: watch the group again, from now on."""
        at_s, known = self._clock.at(now_s), self._groups[group]
        known.lost = False
        known.stillness_from_s = at_s
        self._receive_all(known, at_s)

    def progress(self, members: Iterable[int], step: int) -> tuple[tuple[int, int], ...]:
        """(group, number of pieces of ``step`` that all its ranks have done, as last reported) of all ``members``."""
        return tuple((group, self._pieces(group, step)) for group in sorted(members))

    def standings(self, members: Mapping[int, int], now_s: float) -> dict[int, GroupStanding]:
        """What is known of these groups (group -> incarnation), of those that are watched."""
        at_s, standings = self._clock.at(now_s), {}
        for group, incarnation in members.items():
            known = self._present(group, incarnation)
            if known is not None:
                standings[group] = known.standing(at_s)
        return standings

    def _begin(self, group: int, incarnation: int, size: int, at_s: float) -> WatchedGroup:
        """Know a group anew, and nothing of its ranks."""
        known = self._groups[group] = WatchedGroup(incarnation, size, at_s, at_s, at_s, at_s)
        self._due_s = min(self._due_s, at_s + self._times.heartbeat_timeout_s)
        return known

    def _receive_all(self, known: WatchedGroup, at_s: float) -> None:
        """The group is there, and nobody in it has been silent until now."""
        known.received_s = known.silence_from_s = at_s
        known.closed_s, known.late = None, None
        known.closed_ranks.clear()
        self._due_s = min(self._due_s, at_s + self._times.heartbeat_timeout_s)

    def _present(self, group: int, incarnation: int) -> WatchedGroup | None:
        known = self._groups.get(group)
        return None if known is None or known.incarnation != incarnation or known.lost else known

    def _pieces(self, group: int, step: int) -> int:
        known = self._groups.get(group)
        return known.done[1] if known is not None and known.done[0] == step else 0

    def _follow(self, attempt: Attempt, at_s: float) -> None:
        """Notice that the members have changed, or that they make another attempt."""
        if attempt.members is not self._members and attempt.members != self._members:
            self._begin_progress(attempt.members, at_s)
        self._members = attempt.members
        if attempt.epoch != self._epoch:
            self._epoch, self._epoch_began_s, self._epoch_after_s = attempt.epoch, at_s, self._ticked_s

    def _begin_progress(self, members: Mapping[int, int], at_s: float) -> None:
        """Members have changed, or are about to: ranks leave what they waited in and get new work, and new members have
        waited until now. So nobody is judged for standing still before this time."""
        for group, incarnation in members.items():
            known = self._present(group, incarnation)
            if known is not None:
                known.stillness_from_s = at_s
        self._still_due_s = min(self._still_due_s, at_s + self._times.progress_timeout_s)

    def _due(self, at_s: float) -> list[Finding]:
        """Silent and closed groups by ``at_s``."""
        if at_s < self._due_s:
            return []
        found, self._due_s = [], math.inf
        for group, known in sorted(self._groups.items()):
            if not known.lost:
                due_s, since_s, loss = self._silent_or_closed(group, known, at_s)
                self._due_s = min(self._due_s, due_s)
                if loss is not None:
                    found.append(Finding(loss, self._clock.real(since_s)))
        return found

    def _silent_or_closed(self, group: int, known: WatchedGroup, at_s: float) -> tuple[float, float, Loss | None]:
        """(When the group is lost if nothing more is received, since when there is evidence for it, its loss if that
        time has come). A closed connection says more than silence."""
        grace_s, timeout_s = self._times.grace_s, self._times.heartbeat_timeout_s
        received_s, position = known.received_s, 0
        if known.late is not None and known.late[1] < received_s:
            position, received_s = known.late
        closed = [] if known.closed_s is None else [(-1, known.closed_s, "its connection")]
        closed += [(rank, closed_s, "its connection to its leader") for rank, closed_s in known.closed_ranks.items()]
        due_s = min((closed_s + grace_s for _, closed_s, _ in closed), default=math.inf)
        if at_s >= due_s:
            rank, closed_s, what = min(one for one in closed if at_s >= one[1] + grace_s)
            detail = f"{what} did not come back within {grace_s:g} s"
            return due_s, closed_s, Loss(group, known.incarnation, "closed", rank, detail)
        due_s = min(due_s, received_s + timeout_s)
        if at_s - received_s <= timeout_s:
            return due_s, received_s, None
        detail = f"no heartbeat for {at_s - received_s:.2f} s, the time-out is {timeout_s:g} s"
        return due_s, received_s, Loss(group, known.incarnation, "silent", position, detail)

    def _stalled(self, attempt: Attempt, at_s: float) -> list[Finding]:
        """The group that has stood still for longest while others wait for it; all groups, where none of them waits and
        all have stood still for much longer; none otherwise.

        Only groups whose vote is missing are judged, because the others have done their part. The place of a group is
        that of its rank that is furthest behind. A joiner moves as long as it waits for its donors, who may be the ones
        that stand still; so it is judged only where none of the others is behind.
        """
        if at_s <= self._still_due_s:
            return []
        since_s = (max(known.stood_since_s, self._epoch_began_s) for known in self._present_members(attempt))
        self._still_due_s = min(since_s, default=math.inf) + self._times.progress_timeout_s
        places = self._places(attempt)
        holders = {group: one for group, one in places.items() if group not in attempt.joiners}
        still = self._standing_still(holders, attempt, at_s)
        if not still and all(one.rank.phase in WAITING for one in holders.values()):
            still = self._standing_still(places, attempt, at_s)
        if not still:
            return []
        waiting = self._waiting(attempt)
        total = waiting.total()
        for group in sorted(still, key=lambda group: (still[group].since_s, group)):
            waits = total - waiting[group]
            if waits:
                return [self._still_too_long(attempt, group, still[group], f"while {waits} ranks wait", at_s)]
        limit_s = self._times.hung_s
        if len(places) < len(attempt.members) or any(
            self._still_s(one.since_s, at_s) <= limit_s for one in places.values()
        ):
            return []
        return [self._still_too_long(attempt, group, one, "", at_s) for group, one in places.items()]

    def _standing_still(
        self, places: Mapping[int, JudgedPlace], attempt: Attempt, at_s: float
    ) -> dict[int, JudgedPlace]:
        """Of the groups at these places those that are furthest behind and stand still for too long. In a phase in
        which ranks wait for other groups, a group is behind only where another one is further: then the sum that it
        waits for is complete there, or its own vote did not arrive."""
        last = min((one.at for one in places.values()), default=None)
        behind = {group: one for group, one in places.items() if one.at == last}
        if last is not None and PHASES[last[1]] in WAITING and len(behind) == len(places) and not attempt.voted:
            behind = self._left_behind(behind)
        limit_s = self._times.progress_timeout_s
        return {group: one for group, one in behind.items() if self._still_s(one.since_s, at_s) > limit_s}

    def _waiting(self, attempt: Attempt) -> Counter[int]:
        """Group -> how many of its ranks wait for other groups, of the members."""
        waiting = Counter[int]()
        for group, incarnation in attempt.members.items():
            known = self._present(group, incarnation)
            if known is not None:
                all_of_it = group in attempt.voted or group in attempt.joiners
                waiting[group] = known.size if all_of_it else known.waiting
        return waiting

    def _still_too_long(
        self, attempt: Attempt, group: int, place: JudgedPlace, while_others: str, at_s: float
    ) -> Finding:
        """The loss of a group that stands still while others wait for it, or of one that has hung while nobody does."""
        rank, times = place.rank, self._times
        cause, limit_s = ("stalled", times.progress_timeout_s) if while_others else ("hung", times.hung_s)
        detail = (
            f"step {rank.step}, {rank.phase}, {rank.pieces_done} pieces done: no progress for "
            f"{self._still_s(place.since_s, at_s):.2f} s {while_others or 'and no group waits for another'}, the "
            f"time-out is {limit_s:g} s"
        )
        loss = Loss(group, attempt.members[group], cause, rank.position, detail)
        return Finding(loss, self._clock.real(place.since_s))

    def _places(self, attempt: Attempt) -> dict[int, JudgedPlace]:
        """The place of each member that has not voted: that of its rank that is furthest behind."""
        places = {}
        for group, incarnation in sorted(attempt.members.items()):
            known = self._present(group, incarnation)
            if known is not None and known.last is not None and group not in attempt.voted:
                at = known.last.step, PHASE_ORDER.get(known.last.phase, 0)
                places[group] = JudgedPlace(at, known.last, known.moved_s, known.stood_since_s)
        return places

    def _left_behind(self, places: Mapping[int, JudgedPlace]) -> dict[int, JudgedPlace]:
        """Of groups that all wait at the same place: those that have not begun this epoch's attempt although others
        have."""
        left = {group: one for group, one in places.items() if one.moved_s <= self._epoch_after_s}
        return left if len(left) < len(places) else {}

    def _still_s(self, since_s: float, at_s: float) -> float:
        """How long a rank has stood still in the present epoch; a new epoch gives everybody new work."""
        return at_s - max(since_s, self._epoch_began_s)

    def _present_members(self, attempt: Attempt) -> list[WatchedGroup]:
        found = (self._present(group, incarnation) for group, incarnation in attempt.members.items())
        return [known for known in found if known is not None]
