"""What the page shows of one run at a time, and what of it is new since another time. Pure.

Whoever opens the page gets a whole frame, then only changes, so that a step of a large job is some hundred bytes for
each who looks. Changes of a list are "from this place on, it is this", because the lists here grow at their end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Cell = tuple[str, int, int, str, float]
"""Of a group: 'starting', 'live', 'patching', 'learning' or 'dead'; its pieces in the step in flight; its incarnation,
-1 where none is known; how far it has learned; its speed, about 1 for the median group, 0 where it is not known."""
StepPoint = tuple[int, float, float, int, float | None]
"""Some steps in a row: (last step, when it was committed, longest step in seconds, fewest live groups, last loss)."""


@dataclass(frozen=True)
class Frame:
    """All that is shown of a run, as JSON values."""

    head: Mapping[str, Any]
    cells: Sequence[Cell] = ()
    """By group."""
    parts: Sequence[tuple[str, str, str, float]] = ()
    """(name, what it is called, time as text, share) of the parts of the wall time, longest first."""
    listed: Sequence[Mapping[str, Any]] = ()
    """The last happenings, in order."""
    points: Sequence[StepPoint] = ()


def changes(before: Frame | None, after: Frame) -> dict[str, Any]:
    """What a page that shows ``before`` needs to show ``after``; empty: nothing. None: it shows nothing yet."""
    new: dict[str, Any] = {} if before is not None else {"whole": True}
    shown = before or Frame({})
    if after.head != shown.head:
        new["head"] = after.head
    old: Sequence[Cell | None] = shown.cells
    if len(after.cells) != len(old):
        new["groups"], old = len(after.cells), [None] * len(after.cells)
    cells = {str(group): cell for group, (was, cell) in enumerate(zip(old, after.cells, strict=True)) if cell != was}
    if cells:
        new["cells"] = cells
    if after.parts != shown.parts:
        new["parts"] = after.parts
    for name, was, now in (("told", shown.listed, after.listed), ("points", shown.points, after.points)):
        if now != was:
            same = next((n for n, (a, b) in enumerate(zip(was, now, strict=False)) if a != b), min(len(was), len(now)))
            new[name] = {"from": same, "list": now[same:]}
    return new
