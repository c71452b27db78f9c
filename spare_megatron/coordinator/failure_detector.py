"""Finds groups that are dead or must be taken for dead, from heartbeats, connections and progress counters.

Pure: the time, by the coordinator's own clock, comes in as an argument. The rules are those of protocol rule 11. A
group is lost when it exits; when its connection stays closed for the grace time without the same incarnation coming
back; when a rank is silent for the heartbeat time-out; and when it stands still for the progress time-out while others
wait for it. Where all groups wait for each other and none is behind, none is lost: the attempt has failed and is made
again (:meth:`Detector.standstill`).

The coordinator itself may be stopped or get no CPU time. Nobody is judged for time in which it did not look: when the
gap between two ticks is longer than usual, the excess is added to every deadline.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from spare_megatron.config.timeouts import Timeouts
from spare_megatron.control.reports import PHASES
from spare_megatron.controller.messages import Loss

WAITING = frozenset({"reduce", "vote"})
"""Phases in which a rank waits for other groups."""
_ORDER = {phase: index for index, phase in enumerate(PHASES)}
TICKS_PER_INTERVAL = 4
"""Number of ticks in one heartbeat interval; deadlines are checked at each tick."""


@dataclass(frozen=True)
class Beat:
    """The part of a heartbeat that is about one rank."""

    position: int
    step: int
    phase: str
    counter: int
    in_phase: int
    pieces_done: int


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
    """Groups whose vote of this epoch counts."""


@dataclass
class _Rank:
    heard_s: float
    moved_s: float
    beat: Beat | None = None
    closed_s: float | None = None


@dataclass
class _Group:
    incarnation: int
    ranks: dict[int, _Rank]
    closed_s: float | None = None
    lost: bool = False


class Detector:
    """Watches the present incarnation of each group."""

    def __init__(self, timeouts: Timeouts, now_s: float) -> None:
        self._times = timeouts
        self._groups: dict[int, _Group] = {}
        self._members: dict[int, int] = {}
        self._epoch, self._epoch_began_s = 0, now_s
        self._ticked_s = now_s

    @property
    def tick_s(self) -> float:
        """The interval at which :meth:`tick` should be called."""
        return self._times.heartbeat_interval_s / TICKS_PER_INTERVAL

    @property
    def heartbeat_timeout_s(self) -> float:
        """The time of silence after which a rank counts as dead."""
        return self._times.heartbeat_timeout_s

    def adopt(self, timeouts: Timeouts) -> None:
        """Use the time-outs of the job, once they are known."""
        self._times = timeouts

    # ------------------------------------------------------------------------------------------------ what is heard

    def expect(self, group: int, incarnation: int, now_s: float) -> None:
        """Watch a member that is known from the journal only: it must say Hello within the heartbeat time-out."""
        self._groups[group] = _Group(incarnation, {0: _Rank(now_s, now_s)}, closed_s=None)

    def hello(self, group: int, incarnation: int, ranks: int, now_s: float) -> None:
        """A group says Hello, for the first time or again."""
        known = self._groups.get(group)
        if known is not None and known.incarnation > incarnation:
            return
        if known is None or known.incarnation != incarnation or known.lost:
            known = self._groups[group] = _Group(incarnation, {})
        known.closed_s = None
        for position in range(ranks):
            rank = known.ranks.setdefault(position, _Rank(now_s, now_s))
            rank.heard_s, rank.closed_s = now_s, None

    def heartbeat(self, group: int, incarnation: int, beats: Sequence[Beat], now_s: float) -> None:
        """A leader's heartbeat came, with the ranks that it heard of since its last one."""
        known = self._present(group, incarnation)
        if known is None:
            return
        for beat in beats:
            rank = known.ranks.setdefault(beat.position, _Rank(now_s, now_s))
            rank.heard_s = now_s
            if rank.beat is None or rank.beat.counter != beat.counter:
                rank.moved_s = now_s
            rank.beat = beat

    def closed(self, group: int, incarnation: int, now_s: float, position: int | None = None) -> None:
        """The present connection of a group (``position`` None) or of one of its ranks closed."""
        known = self._present(group, incarnation)
        if known is None:
            return
        if position is None:
            known.closed_s = now_s
        elif position in known.ranks:
            known.ranks[position].closed_s = now_s

    def opened(self, group: int, incarnation: int, position: int, now_s: float) -> None:
        """A rank is connected to its leader again."""
        known = self._present(group, incarnation)
        if known is not None and position in known.ranks:
            known.ranks[position].closed_s = None
            known.ranks[position].heard_s = now_s

    def lost(self, group: int, incarnation: int) -> bool:
        """The group is known to be gone, for example because it exited. False where that was known already, or a newer
        incarnation has come."""
        known = self._groups.get(group)
        if known is not None and (known.incarnation > incarnation or (known.incarnation == incarnation and known.lost)):
            return False
        self._groups[group] = _Group(incarnation, {}, lost=True)
        return True

    # ----------------------------------------------------------------------------------------------- what is decided

    def tick(self, now_s: float, attempt: Attempt | None = None) -> list[Finding]:
        """Losses that are due now, each returned once. The members of ``attempt`` are judged for progress too; it is
        None while the job does not train."""
        self._forgive(now_s)
        found = self._due(now_s)
        if found:
            # Losses that would be found at the next tick mostly have the same cause: they go into the same epoch.
            found = self._due(now_s + self.tick_s)
        if attempt is None:
            self._members, self._epoch = {}, 0  # standing still before or in this time does not count
        elif not found:
            self._follow(attempt, now_s)
            stalled = self._stalled(attempt, now_s)
            if stalled is not None:
                found.append(stalled)
                self._begin_progress(attempt.members, now_s)
        for finding in found:
            self._groups[finding.loss.group].lost = True
        return found

    def standstill(self, now_s: float, attempt: Attempt) -> str:
        """Why the present attempt cannot end although nobody is to blame: all ranks have waited for each other at the
        same place for the progress time-out. Empty where that is not so. Called after :meth:`tick`, with the same
        time."""
        self._follow(attempt, now_s)
        places = self._places(attempt)
        if attempt.voted or len(places) < len(attempt.members) or len({one.at for one in places.values()}) != 1:
            return ""
        beat = min(places.values(), key=lambda one: one.beat.position).beat
        still_s = min(self._still_s(one.rank, now_s) for one in places.values())
        if beat.phase not in WAITING or still_s <= self._times.progress_timeout_s:
            return ""
        return (
            f"all {len(places)} groups have waited for each other in step {beat.step}, {beat.phase}, for "
            f"{still_s:.2f} s; the time-out is {self._times.progress_timeout_s:g} s"
        )

    def all_wait(self, groups: Iterable[int]) -> bool:
        """True when every rank of these groups waits for other groups."""
        ranks = [rank for group in groups if group in self._groups for rank in self._groups[group].ranks.values()]
        return all(rank.beat is not None and rank.beat.phase in WAITING for rank in ranks)

    def spare(self, group: int, now_s: float) -> None:
        """The machine did not act on a loss that was found: watch the group again, from now on."""
        known = self._groups[group]
        known.lost, known.closed_s = False, None
        for rank in known.ranks.values():
            rank.heard_s = rank.moved_s = now_s
            rank.closed_s = None

    def progress(self, members: Iterable[int], step: int) -> tuple[tuple[int, int], ...]:
        """(group, number of pieces of ``step`` that all its ranks have done, as last reported) of all ``members``."""
        return tuple((group, self._pieces(group, step)) for group in sorted(members))

    def _present(self, group: int, incarnation: int) -> _Group | None:
        known = self._groups.get(group)
        return None if known is None or known.incarnation != incarnation or known.lost else known

    def _pieces(self, group: int, step: int) -> int:
        known = self._groups.get(group)
        if known is None or not known.ranks:
            return 0
        beats = [rank.beat for rank in known.ranks.values()]
        return min(beat.pieces_done if beat is not None and beat.step == step else 0 for beat in beats)

    def _forgive(self, now_s: float) -> None:
        """Where the last tick is longer ago than usual, move all times forward by the excess."""
        missed_s = now_s - self._ticked_s - 2 * self.tick_s
        self._ticked_s = now_s
        if missed_s <= 0:
            return
        self._epoch_began_s = min(now_s, self._epoch_began_s + missed_s)
        for known in self._groups.values():
            if known.closed_s is not None:
                known.closed_s = min(now_s, known.closed_s + missed_s)
            for rank in known.ranks.values():
                rank.heard_s = min(now_s, rank.heard_s + missed_s)
                rank.moved_s = min(now_s, rank.moved_s + missed_s)
                if rank.closed_s is not None:
                    rank.closed_s = min(now_s, rank.closed_s + missed_s)

    def _follow(self, attempt: Attempt, now_s: float) -> None:
        """Notice that the members have changed, or that they make another attempt."""
        if attempt.members != self._members:
            self._begin_progress(attempt.members, now_s)
        if attempt.epoch != self._epoch:
            self._epoch, self._epoch_began_s = attempt.epoch, now_s

    def _begin_progress(self, members: Mapping[int, int], now_s: float) -> None:
        """Members have changed, or are about to: ranks leave what they waited in and get new work, and new members have
        waited until now. So nobody is judged for standing still before this time."""
        self._members = dict(members)
        for group, incarnation in members.items():
            known = self._present(group, incarnation)
            for rank in known.ranks.values() if known is not None else ():
                rank.moved_s = now_s

    def _due(self, now_s: float) -> list[Finding]:
        known = ((group, self._groups[group]) for group in sorted(self._groups))
        found = (self._silent_or_closed(group, one, now_s) for group, one in known if not one.lost)
        return [finding for finding in found if finding is not None]

    def _silent_or_closed(self, group: int, known: _Group, now_s: float) -> Finding | None:
        grace_s, timeout_s = self._times.grace_s, self._times.heartbeat_timeout_s
        if known.closed_s is not None and now_s - known.closed_s >= grace_s:
            detail = f"its connection did not come back within {grace_s:g} s"
            return Finding(Loss(group, known.incarnation, "closed", -1, detail), known.closed_s)
        for position, rank in sorted(known.ranks.items()):
            if rank.closed_s is not None and now_s - rank.closed_s >= grace_s:
                detail = f"its connection to its leader did not come back within {grace_s:g} s"
                return Finding(Loss(group, known.incarnation, "closed", position, detail), rank.closed_s)
        silent = [
            (rank.heard_s, position) for position, rank in known.ranks.items() if now_s - rank.heard_s > timeout_s
        ]
        if not silent:
            return None
        heard_s, position = min(silent)
        detail = f"no heartbeat for {now_s - heard_s:.2f} s, the time-out is {timeout_s:g} s"
        return Finding(Loss(group, known.incarnation, "silent", position, detail), heard_s)

    def _stalled(self, attempt: Attempt, now_s: float) -> Finding | None:
        """The group that has stood still for longest while others wait for it; None where there is none.

        Only groups whose vote is missing are judged, because the others have done their part. The place of a group is
        that of its rank that is furthest behind. In a phase in which ranks wait for other groups, a group is behind
        only where another one is further: then the sum that it waits for is complete there, or its own vote did not
        arrive.
        """
        places = self._places(attempt)
        if not places:
            return None
        last = min(places.values(), key=lambda one: one.at).at
        behind = {group: one for group, one in places.items() if one.at == last}
        if PHASES[last[1]] in WAITING and len(behind) == len(places) and not attempt.voted:
            behind = self._left_behind(behind)
        still = {
            group: one
            for group, one in behind.items()
            if self._still_s(one.rank, now_s) > self._times.progress_timeout_s
        }
        if not still:
            return None
        group = min(still, key=lambda group: (still[group].rank.moved_s, group))
        rank, beat = still[group].rank, still[group].beat
        waits = sum(
            other is not rank and other.beat is not None and other.beat.phase in WAITING
            for member in self._present_members(attempt)
            for other in member.ranks.values()
        )
        if not waits:
            return None
        detail = (
            f"step {beat.step}, {beat.phase}, {beat.pieces_done} pieces done: no progress for "
            f"{self._still_s(rank, now_s):.2f} s while {waits} ranks wait, the time-out is "
            f"{self._times.progress_timeout_s:g} s"
        )
        return Finding(Loss(group, attempt.members[group], "stalled", beat.position, detail), rank.moved_s)

    def _places(self, attempt: Attempt) -> dict[int, _Place]:
        """The place of each member that has not voted: that of its rank that is furthest behind."""
        places = {}
        for group, incarnation in sorted(attempt.members.items()):
            known = self._present(group, incarnation)
            ranks = [(rank.beat, rank) for rank in known.ranks.values() if rank.beat is not None] if known else []
            if ranks and group not in attempt.voted:
                beat, rank = min(ranks, key=_how_far)
                places[group] = _Place(_at(beat), beat, rank)
        return places

    def _left_behind(self, places: Mapping[int, _Place]) -> dict[int, _Place]:
        """Of groups that all wait at the same place: those that have not begun this epoch's attempt although others
        have."""
        left = {group: one for group, one in places.items() if one.rank.moved_s <= self._epoch_began_s}
        return left if len(left) < len(places) else {}

    def _still_s(self, rank: _Rank, now_s: float) -> float:
        """How long a rank has stood still in the present epoch; a new epoch gives everybody new work."""
        return now_s - max(rank.moved_s, self._epoch_began_s)

    def _present_members(self, attempt: Attempt) -> list[_Group]:
        found = (self._present(group, incarnation) for group, incarnation in attempt.members.items())
        return [known for known in found if known is not None]


@dataclass(frozen=True)
class _Place:
    """The place of a group, and the rank that is there."""

    at: tuple[int, int]
    beat: Beat
    rank: _Rank


def _how_far(one: tuple[Beat, _Rank]) -> tuple[float, ...]:
    """Sort key for the ranks of one group; of two at the same place, the one that has stood still longer is behind."""
    beat, rank = one
    return (*_at(beat), rank.moved_s, beat.in_phase, beat.position)


def _at(beat: Beat) -> tuple[int, int]:
    """The place of a rank: (step, index of its phase)."""
    return beat.step, _ORDER.get(beat.phase, 0)
