"""What a timeline is made of: tracks, slices on them, and the arrows between slices. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

TrackName = tuple[str, ...]
"""Names from the outermost track to the track itself: ('groups', 'group 3')."""
JOB, GROUPS = "job", "groups"
JOB_TRACKS = ("what is shown", "lives", "epochs", "events", "steps")
"""In this order."""
Detail = str | int | float | bool
Details = Mapping[str, Detail]


@dataclass(frozen=True)
class TraceSlice:
    """Something that took a while, or, where it begins and ends at once, a moment. Times are in seconds since 1970."""

    track: TrackName
    name: str
    begin_s: float
    end_s: float
    details: Details = field(default_factory=dict)
    flows: tuple[int, ...] = ()
    """Slices with the same number are joined by an arrow, in the order of time."""


@dataclass(frozen=True)
class JobTimeline:
    """The timeline of a job."""

    slices: list[TraceSlice]
    note: str
    """What is left out, in words; empty: nothing."""

    @property
    def tracks(self) -> list[TrackName]:
        """All tracks, the ones around them before them, in the order in which they are to be shown."""
        names = {one.track[:depth] for one in self.slices for depth in range(1, len(one.track) + 1)}
        return sorted(names, key=lambda name: tuple(map(_place, name)))


def job_track(name: str) -> TrackName:
    """A track of the whole job."""
    return JOB, name


def group_track(group: int, name: str = "") -> TrackName:
    """The track of a group, or one below it of what it does beside its steps."""
    return (GROUPS, f"group {group}", name) if name else (GROUPS, f"group {group}")


def _place(name: str) -> tuple[int, str, int]:
    """The job comes before the groups, and numbers are in their order."""
    if name in (JOB, *JOB_TRACKS):
        return (JOB, *JOB_TRACKS).index(name), "", 0
    head, _, number = name.rpartition(" ")
    return (len(JOB_TRACKS) + 1, head, int(number)) if number.isdecimal() else (len(JOB_TRACKS) + 1, name, -1)
