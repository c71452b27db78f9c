"""Finds what ranks reported of a step in their files (``--spare-rank-times``), without reading all of them.

May assume: others append meanwhile. Steps only grow in a file, each start of a group has its own, so a step is looked
up by halving. What cannot be read is left out and reported; nothing else depends on it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from spare_megatron.metrics.rank_lines import RankLine, parsed
from spare_megatron.runtime.run_directory import RunDirectory

CHUNK_BYTES = 1024
"""So short a stretch is read as a whole."""
OTHERS_MAX = 16
"""After so many lines in a row that are none of ours no more are looked at."""
_GROUP, _RANK = re.compile(r"group-(\d+)"), re.compile(r"rank-(\d+)\.incarnation-\d+\.jsonl")


class RankFiles:
    """The files of the ranks of one run directory."""

    def __init__(self, run_dir: RunDirectory) -> None:
        self._dir = run_dir
        self.positions: Mapping[int, Sequence[int]] = {
            int(found[1]): _positions(path) for path, found in _named(run_dir.rank_times, _GROUP)
        }
        """Group -> the positions whose ranks have reported anything."""
        self.left_out = False
        """Whether something could not be read."""

    def lines(self, group: int, incarnation: int, step: int, positions: Sequence[int]) -> list[tuple[int, RankLine]]:
        """(position, line) of what ranks of this start of a group reported of ``step``."""
        found = []
        for position in positions:
            try:
                with self._dir.rank_times_of(group, position, incarnation).open("rb") as file:
                    reported = _StepsOfFile(file)
                    found += [(position, line) for line in reported.of(step)]
            except FileNotFoundError:
                continue
            except OSError:
                self.left_out = True
                continue
            self.left_out = self.left_out or reported.left_out
        return found


class _StepsOfFile:
    """The lines of one file, as it is now."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._end = file, os.fstat(file.fileno()).st_size
        self.left_out = False

    def of(self, step: int) -> Iterator[RankLine]:
        """The lines of ``step``: as a rule one, or none."""
        low, high = 0, self._end
        while high - low > CHUNK_BYTES:
            middle = (low + high) // 2
            first = next(self._lines(middle), None)
            if first is None or first.step >= step:
                high = middle
            else:
                low = middle
        for line in self._lines(low):
            if line.step > step:
                return
            if line.step == step:
                yield line

    def _lines(self, offset: int) -> Iterator[RankLine]:
        """The complete lines that begin behind ``offset``, or at it where it is 0."""
        self._file.seek(offset)
        at, others = offset + (len(self._file.readline()) if offset else 0), 0
        while at < self._end and others < OTHERS_MAX:
            text = self._file.readline()
            at += len(text)
            if not text.endswith(b"\n"):
                return
            line = parsed(text)
            if line is not None:
                others = 0
                yield line
            elif text.strip():
                others, self.left_out = others + 1, True


def _positions(folder: Path) -> list[int]:
    return sorted({int(found[1]) for _, found in _named(folder, _RANK)})


def _named(folder: Path, pattern: re.Pattern[str]) -> Iterator[tuple[Path, re.Match[str]]]:
    """What is in a folder under names of this form; nothing where it cannot be read."""
    try:
        paths = sorted(folder.iterdir())
    except OSError:
        return
    for path in paths:
        found = pattern.fullmatch(path.name)
        if found:
            yield path, found
