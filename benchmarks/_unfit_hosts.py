"""Hosts of a soaked job that are now and then fit for one rank less than a group has, by a seeded schedule.

A group that is lost meanwhile comes back in a smaller shape, and goes home when its host is fit again.
"""

from __future__ import annotations

import random
from pathlib import Path

GROUP = "SPARE_GROUP"
SHAPES = ("--spare-shapes", "auto")
"""Of the failure-free job as well: digests are by row, and rows follow from the shapes."""


class UnfitHosts:
    """The hosts of one job's groups."""

    def __init__(
        self, folder: Path, seed: int, duration_s: float, shape: tuple[int, int], mean_s: float = 20.0
    ) -> None:
        """``folder`` gets a file for each host that is not fit now. ``shape``: groups, and ranks of each. ``mean_s`` is
        the mean time between two changes of one host."""
        self._folder, (groups, self._ranks) = folder, shape
        folder.mkdir(parents=True)
        draw = random.Random(f"hosts {seed}")
        self._changes: list[tuple[float, int]] = []
        for group in range(groups):
            at_s = 0.0
            while (at_s := at_s + draw.expovariate(1 / mean_s)) < duration_s:
                self._changes.append((at_s, group))
        self._changes.sort()
        self.changed = 0

    @property
    def flags(self) -> tuple[str, ...]:
        """Of the soaked job, beside :data:`SHAPES`."""
        check = f'[ ! -e {self._folder}/${GROUP} ] || [ "$SPARE_GROUP_SIZE" -lt {self._ranks} ]'
        return ("--spare-health-check", check)

    def look(self, now_s: float) -> None:
        """Make the changes that are due."""
        while self._changes and self._changes[0][0] <= now_s:
            mark = self._folder / str(self._changes.pop(0)[1])
            self.changed += 1
            if mark.exists():
                mark.unlink()
            else:
                mark.touch()

    def end(self) -> None:
        """All hosts are fit, and stay so."""
        self._changes.clear()
        for mark in self._folder.iterdir():
            mark.unlink()
