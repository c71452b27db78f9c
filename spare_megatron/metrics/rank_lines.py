"""The lines in which a rank tells when it did which part of a step (``--spare-rank-times``). Pure.

A line is JSON: the step, its beginning in seconds since 1970, and for each part its name, beginning and end in seconds
from there. Parts do not overlap. What lies between two of them is waiting for orders.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

BROKEN = "reduce, broken off"
"""A reduction that failed, or whose epoch ended."""
RankPart = tuple[str, float, float]
"""('compute', beginning, end)."""


@dataclass(frozen=True)
class RankLine:
    """What one rank did in one step that was committed, and, if that is its first one, before it."""

    step: int
    began_s: float
    """Of the first part, in seconds since 1970, by the clock of the rank's host."""
    parts: Sequence[RankPart]
    """In the order of time; seconds since ``began_s``."""


def encoded(line: RankLine) -> bytes:
    """The line as it is written."""
    parts = [[name, round(began_s, 6), round(ended_s, 6)] for name, began_s, ended_s in line.parts]
    plain = {"step": line.step, "began_s": round(line.began_s, 6), "parts": parts}
    return json.dumps(plain, separators=(",", ":")).encode() + b"\n"


def parsed(text: bytes) -> RankLine | None:
    """The line; None where it is none, or one of another version."""
    try:
        plain: Any = json.loads(text)
        step, began_s = plain["step"], float(plain["began_s"])
        parts = [(str(name), float(from_s), float(to_s)) for name, from_s, to_s in plain["parts"]]
    except (ValueError, TypeError, KeyError):
        return None
    return RankLine(step, began_s, parts) if type(step) is int else None
