"""Durations as text. Pure, and quick to import."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """A duration as people say it: '12 ms', '3.42 s', '7:05 min', '26:03 h'."""
    if abs(seconds) < 0.1:
        return f"{1000 * seconds:.0f} ms"
    if abs(seconds) < 60:
        return f"{seconds:.2f} s"
    minutes, rest_s = divmod(round(seconds), 60)
    return f"{minutes}:{rest_s:02} min" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02} h"
