"""How a leader turns the reports of its ranks into one report of its group. Pure: no I/O, no clock.

A group votes ok when every rank has reduced the same pieces of the same (step, epoch), and no as soon as one rank
failed. A group has applied a step, holds a state, or has seen an epoch when its last rank reports so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Generic, TypeVar

from spare_megatron.control_plane.reports import Reduced, checksum_of
from spare_megatron.protocol.messages import Link, ReductionResult, Vote

VoteFigures = tuple[tuple[str, float], ...]
_PLUS = "+"


class Ballots:
    """The votes of one group, one for each (step, epoch)."""

    def __init__(self, group: int, incarnation: int, rows: int) -> None:
        self._group, self._incarnation, self._size = group, incarnation, rows
        self._at = (0, 0)
        self._reduced: dict[int, Reduced] = {}
        """Row -> what its rank said of the newest (step, epoch)."""
        self.last: tuple[Vote, VoteFigures] | None = None
        """The last vote, to be sent again while its (step, epoch) is the present one."""

    @property
    def held(self) -> tuple[int, int] | None:
        """(step, epoch) of the reduced result that every rank of the group has, if the last vote was ok."""
        if self.last is None or not self.last[0].result.ok:
            return None
        return self.last[0].result.at

    def add(self, row: int, reduced: Reduced, position: int | None = None) -> tuple[Vote, VoteFigures] | None:
        """Add the result of one row, of the rank at ``position`` (None: with the row's number); returns the group's
        vote if this result decides it. Results of an older (epoch, step) are dropped."""
        result = reduced.result
        at = (result.epoch, result.step)
        if at < self._at:
            return None
        if at > self._at:
            self._at, self._reduced = at, {}
        if self.last is not None and self.last[0].result.at == result.at:
            return None
        self._reduced[row] = reduced
        if not result.ok:
            rank = row if position is None else position
            detail = f"rank {rank}: {result.detail or 'no reason given'}"
            return self._vote(False, detail, result.links, result.corrupt)
        if len(self._reduced) < self._size:
            return None
        results = [self._reduced[p].result for p in sorted(self._reduced)]
        if len(set(map(_pieces_of, results))) > 1:
            counts = ", ".join(str(len(one.pieces)) for one in results)
            return self._vote(False, f"the ranks of the group reduced different pieces ({counts})", ())
        return self._vote(True, "", ())

    def forget_older(self, epoch: int, committed: tuple[int, int]) -> None:
        """Discard the last vote when a newer epoch begins, unless its result is the one that was committed last."""
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
            result_digest=joined_digests(one.result_digest for one in ranks) if ok else "",
            weights_digest=joined_digests(one.weights_digest for one in ranks) if ok else "",
            links=links,
            corrupt=corrupt,
            detail=detail,
            checksums=_joined_checksums([one.checksums for one in ranks]) if ok else (),
            audits=_joined_checksums([one.audits for one in ranks]) if ok else (),
            parts=tuple(part for one in ranks for part in one.parts) if ok else (),
            state=_joined_checksums([one.state for one in ranks]) if ok else (),
        )
        figures = greatest(one.figures for one in reports)
        self.last = (Vote(self._group, self._incarnation, result), figures)
        return self.last


def joined_digests(digests: Iterable[str]) -> str:
    """Combine the digests of a group's ranks, in order of position, into one, each of the parts that a '+' separates by
    itself; empty when no rank gave one."""
    parts = zip_longest(*(one.split(_PLUS) for one in digests), fillvalue="")
    return _PLUS.join(_joined(of_ranks) for of_ranks in parts)


def first_part(digest: str) -> str:
    """What a digest has before a '+': the part that is equal in jobs of any number of groups."""
    return digest.partition(_PLUS)[0]


def _joined(parts: Sequence[str]) -> str:
    if not any(parts):
        return ""
    return parts[0] if len(parts) == 1 else hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _pieces_of(result: ReductionResult) -> tuple[tuple[int, ...], ...]:
    """The pieces, and those with a checksum or an audit: all ranks of a group must agree on them."""
    return (result.pieces, *(tuple(piece for piece, _ in pairs) for pairs in (result.checksums, result.audits)))


def _joined_checksums(ranks: Sequence[tuple[tuple[int, int], ...]]) -> tuple[tuple[int, int], ...]:
    """Combine the ranks' checksums of each piece or state shard, in order of position, into one (64 bits, signed)."""
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


class MinOverRanks(Generic[Mark]):
    """The highest mark that each rank of a group has reached, and that all have; marks only grow.

    A mark is an applied step, a seen epoch, or the (step, epoch) of a report that a state is held."""

    def __init__(self, group_size: int, start: Mark) -> None:
        self._at: list[Mark] = [start] * group_size
        self.reached: Mark = start
        """The mark that all ranks have reached."""

    def add(self, position: int, mark: Mark) -> bool:
        """Note that one rank reached ``mark``; true when :attr:`reached` grows by it."""
        self._at[position] = max(self._at[position], mark)
        before, self.reached = self.reached, min(self._at)
        return bool(self.reached > before)


class Tally:
    """How many pieces of its step the whole group has done, which is what its slowest rank has done.

    Each rank's report costs O(1), and one more for each piece that the group as a whole goes on.
    """

    def __init__(self, group_size: int) -> None:
        self._ranks = [(0, 0, False)] * group_size
        self._reported = (0, 0, False)
        self.step = 0
        """The newest step that a rank is in."""
        self._counts = {0: group_size}
        """Number of pieces -> ranks in :attr:`step` that have done so many."""
        self._in_step, self._complete, self._least = group_size, 0, 0

    @property
    def done(self) -> int:
        """Pieces of :attr:`step` that all ranks have done."""
        return self._least if self._in_step == len(self._ranks) else 0

    def add(self, position: int, step: int, pieces_done: int, complete: bool) -> tuple[bool, bool]:
        """Note that one rank has done ``pieces_done`` pieces of ``step``; ``complete``: all of its run.

        Returns:
            Whether the group as a whole is further than before, and whether all its ranks are complete now.
        """
        before, self._ranks[position] = self._ranks[position], (step, pieces_done, complete)
        if step > self.step:
            self.step, self._counts = step, {}
            self._in_step, self._complete, self._least = 0, 0, pieces_done
        self._count(before, -1)
        self._count(self._ranks[position], 1)
        while self._in_step and not self._counts.get(self._least):
            self._least += 1
        now = (self.step, self.done, self._complete == len(self._ranks))
        risen = now > self._reported and now[1:] > (0, False)
        self._reported = max(now, self._reported)
        return risen, risen and now[2]

    def _count(self, rank: tuple[int, int, bool], change: int) -> None:
        step, pieces_done, complete = rank
        if step == self.step:
            self._counts[pieces_done] = self._counts.get(pieces_done, 0) + change
            self._in_step += change
            self._complete += complete * change
            self._least = min(self._least, pieces_done)


def merge_reports(reports: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Merge what the ranks of a group report of one step: each key has the value of the lowest position that gives
    it."""
    merged: dict[str, Any] = {}
    for position in sorted(reports):
        for key, value in reports[position].items():
            merged.setdefault(key, value)
    return merged
