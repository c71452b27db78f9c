"""How a leader turns the reports of its ranks into one report of its group. Pure: no I/O, no clock.

A group votes ok when every rank has reduced the same pieces of the same (step, epoch), and no as soon as one rank
failed. A group has applied a step, holds a state, or has seen an epoch when its last rank says so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from spare_megatron.control.reports import Reduced, checksum_of
from spare_megatron.controller.messages import Link, ReductionResult, Vote

VoteFigures = tuple[tuple[str, float], ...]


class Ballots:
    """The votes of one group, one for each (step, epoch)."""

    def __init__(self, group: int, incarnation: int, group_size: int) -> None:
        self._group, self._incarnation, self._size = group, incarnation, group_size
        self._at = (0, 0)
        self._reduced: dict[int, Reduced] = {}
        """Rank position -> what it said of the newest (step, epoch)."""
        self.last: tuple[Vote, VoteFigures] | None = None
        """The last vote, to be sent again while its (step, epoch) is the present one."""

    @property
    def held(self) -> tuple[int, int] | None:
        """(step, epoch) of the reduced result that every rank of the group has, if the last vote was ok."""
        if self.last is None or not self.last[0].result.ok:
            return None
        return self.last[0].result.at

    def add(self, position: int, reduced: Reduced) -> tuple[Vote, VoteFigures] | None:
        """One rank's result; the group's vote when this decides it. Results of an older (epoch, step) are dropped."""
        result = reduced.result
        at = (result.epoch, result.step)
        if at < self._at:
            return None
        if at > self._at:
            self._at, self._reduced = at, {}
        if self.last is not None and self.last[0].result.at == result.at:
            return None
        self._reduced[position] = reduced
        if not result.ok:
            detail = f"rank {position}: {result.detail or 'no reason given'}"
            return self._vote(False, detail, result.links, result.corrupt)
        if len(self._reduced) < self._size:
            return None
        results = [self._reduced[p].result for p in sorted(self._reduced)]
        if len(set(map(_pieces_of, results))) > 1:
            counts = ", ".join(str(len(one.pieces)) for one in results)
            return self._vote(False, f"the ranks of the group reduced different pieces ({counts})", ())
        return self._vote(True, "", ())

    def forget_older(self, epoch: int, committed: tuple[int, int]) -> None:
        """A newer epoch: results of other epochs are discarded, but for the one that the last commit is about."""
        if self.last is not None and self.last[0].result.epoch < epoch and self.held != committed:
            self.last = None

    def _vote(self, ok: bool, detail: str, links: tuple[Link, ...], corrupt: bool = False) -> tuple[Vote, VoteFigures]:
        epoch, step = self._at
        reports = [self._reduced[p] for p in sorted(self._reduced)]
        ranks = [one.result for one in reports]
        result = ReductionResult(
            step=step,
            epoch=epoch,
            ok=ok,
            pieces=ranks[0].pieces if ok else (),
            result_digest=_joined(one.result_digest for one in ranks) if ok else "",
            weights_digest=_joined(one.weights_digest for one in ranks) if ok else "",
            links=links,
            corrupt=corrupt,
            detail=detail,
            checksums=_joined_checksums([one.checksums for one in ranks]) if ok else (),
            audits=_joined_checksums([one.audits for one in ranks]) if ok else (),
            parts=tuple(part for one in ranks for part in one.parts) if ok else (),
        )
        figures = greatest(one.figures for one in reports)
        self.last = (Vote(self._group, self._incarnation, result), figures)
        return self.last


def _joined(digests: Iterable[str]) -> str:
    """One digest of a group from those of its ranks, in order of position; empty when no rank gave one."""
    parts = list(digests)
    if not any(parts):
        return ""
    return parts[0] if len(parts) == 1 else hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _pieces_of(result: ReductionResult) -> tuple[tuple[int, ...], ...]:
    """Everything that must be the same on all ranks of a group."""
    return (result.pieces, *(tuple(piece for piece, _ in pairs) for pairs in (result.checksums, result.audits)))


def _joined_checksums(ranks: Sequence[tuple[tuple[int, int], ...]]) -> tuple[tuple[int, int], ...]:
    """One checksum (64 bits, signed) of each piece from those of the ranks, in order of position."""
    joined = []
    for pairs in zip(*ranks, strict=True):
        text = ",".join(str(checksum) for _, checksum in pairs)
        joined.append((pairs[0][0], checksum_of(text)))
    return tuple(joined)


def greatest(figures: Iterable[VoteFigures]) -> VoteFigures:
    """The greatest value of each figure."""
    best: dict[str, float] = {}
    for one in figures:
        for name, value in one:
            best[name] = max(value, best.get(name, value))
    return tuple(sorted(best.items()))


Mark = TypeVar("Mark", int, tuple[int, int])


class Roll(Generic[Mark]):
    """Which ranks have reached a mark that only grows (an applied step, a held step of an epoch, a seen epoch)."""

    def __init__(self, group_size: int, start: Mark) -> None:
        self._at = [start] * group_size
        self.reached = start
        """What every rank has reached."""

    def add(self, position: int, mark: Mark) -> bool:
        """One rank reached ``mark``; true when this makes it the group's."""
        self._at[position] = max(self._at[position], mark)
        before, self.reached = self.reached, min(self._at)
        return self.reached > before


class Tally:
    """How many pieces of its step the whole group has done: what the slowest rank has."""

    def __init__(self, group_size: int) -> None:
        self._ranks = [(0, 0, False)] * group_size
        self._told = (0, 0, False)

    def add(self, position: int, step: int, pieces_done: int, complete: bool) -> tuple[bool, bool]:
        """One rank has done ``pieces_done`` pieces of ``step``, ``complete`` when that is its segment; whether this is
        news of the group, and whether the news is that all of its ranks are complete."""
        self._ranks[position] = (step, pieces_done, complete)
        newest = max(step for step, _, _ in self._ranks)
        done = min(count if step == newest else 0 for step, count, _ in self._ranks)
        now = (newest, done, all(one[0] == newest and one[2] for one in self._ranks))
        risen = now > self._told and now[1:] > (0, False)
        self._told = max(now, self._told)
        return risen, risen and now[2]


def merge_reports(reports: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """What the ranks of a group know of one step: for each key the word of the lowest position that has one."""
    merged: dict[str, Any] = {}
    for position in sorted(reports):
        for key, value in reports[position].items():
            merged.setdefault(key, value)
    return merged
