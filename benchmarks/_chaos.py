"""The schedule of a soak: which fault strikes whom, and when. A pure function of the seed.

A longer schedule of the same seed, shape and figures begins with the shorter one. Each fault takes the same number of
draws, whatever its kind, so that another table of kinds leaves moments and targets as they were.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate

APART_S = 1.0
"""The most time between the kills of two groups that are killed in quick succession."""
HUNT_S = 8.0
"""The most time from the moment at which a group is seen to learn until a fault that waited for it strikes: within such
a time it builds its model, takes the state, joins and trains."""
SHORT, LONG = (0.02, 0.6), (1.3, 2.2)
"""Pauses in heartbeat time-outs: one of which nobody may die, and one that counts as a death where its process has
heartbeats."""


class Kind(Enum):
    """What a fault is."""

    KILL_RANK = "kill a rank"
    KILL_GROUP = "kill a group"
    KILL_TWO_GROUPS = "kill two groups"
    KILL_LEARNER = "kill a rank of a group that learns"
    KILL_COORDINATOR = "kill the coordinator"
    PAUSE_RANK = "pause a rank"
    PAUSE_LEARNER = "pause a rank of a group that learns"
    PAUSE_LEADER = "pause a leader"
    PAUSE_COORDINATOR = "pause the coordinator"
    OUT_OF_MEMORY = "the kernel ends a rank that is out of memory"
    HOLD_LOCK = "a rank holds the interpreter's lock"
    CLOCK = "a process's wall clock jumps"
    DISK = "a file fails"
    LOSS = "packets are lost"
    HOLE = "long packets are lost"
    CUT = "nothing comes to a rank's ports"
    FLAP = "a rank's ports are cut off again and again"
    RESET = "what comes to a rank's ports is reset"
    STRANGERS = "strangers connect to a process's ports"


WEIGHTS: Mapping[Kind, int] = {
    Kind.KILL_RANK: 4,
    Kind.KILL_GROUP: 3,
    Kind.KILL_TWO_GROUPS: 2,
    Kind.KILL_LEARNER: 2,
    Kind.KILL_COORDINATOR: 1,
    Kind.PAUSE_RANK: 4,
    Kind.PAUSE_LEARNER: 2,
    Kind.PAUSE_LEADER: 2,
    Kind.PAUSE_COORDINATOR: 2,
}
WEATHER: Mapping[Kind, int] = {
    Kind.KILL_RANK: 2,
    Kind.KILL_GROUP: 1,
    Kind.KILL_LEARNER: 1,
    Kind.KILL_COORDINATOR: 1,
    Kind.PAUSE_RANK: 3,
    Kind.PAUSE_LEADER: 2,
    Kind.PAUSE_COORDINATOR: 2,
    Kind.OUT_OF_MEMORY: 2,
    Kind.HOLD_LOCK: 4,
    Kind.CLOCK: 8,
    Kind.DISK: 10,
    Kind.LOSS: 8,
    Kind.HOLE: 4,
    Kind.CUT: 2,
    Kind.FLAP: 2,
    Kind.RESET: 2,
    Kind.STRANGERS: 8,
}
"""What else strikes jobs than deaths and pauses (benchmarks/weather.py); most of it may end nobody."""
OF_THE_COORDINATOR = (Kind.KILL_COORDINATOR, Kind.PAUSE_COORDINATOR)
PAUSES = (Kind.PAUSE_RANK, Kind.PAUSE_LEARNER, Kind.PAUSE_LEADER, Kind.PAUSE_COORDINATOR)
OF_ONE_RANK = (Kind.KILL_RANK, Kind.KILL_LEARNER, Kind.PAUSE_RANK, Kind.PAUSE_LEARNER, Kind.OUT_OF_MEMORY)
OF_ONE_RANK += (Kind.HOLD_LOCK, Kind.CUT, Kind.FLAP, Kind.RESET)
OF_ALL = (Kind.CLOCK, Kind.DISK, Kind.LOSS, Kind.HOLE, Kind.STRANGERS)
"""They strike nobody in particular and may end nobody. Their position, below WHICH, says what they strike."""
WHICH = 1000
OF_WEATHER = (*OF_ALL, Kind.OUT_OF_MEMORY, Kind.HOLD_LOCK, Kind.CUT, Kind.FLAP, Kind.RESET)
OF_LINKS = (Kind.CUT, Kind.FLAP, Kind.RESET)
ENDS = (Kind.OUT_OF_MEMORY, *OF_LINKS)
"""Whom they strike may be lost, however short they are."""
HUNTS = (Kind.KILL_LEARNER, Kind.PAUSE_LEARNER)
"""They wait for a group that learns, and strike it some time later."""


@dataclass(frozen=True)
class Fault:
    """One fault of a schedule."""

    at_s: float
    """Since the schedule began."""
    kind: Kind
    groups: tuple[int, ...]
    """The groups that it strikes; none where it strikes the coordinator, or whichever group learns."""
    position: int
    """Of the rank that it strikes, where it strikes one; else -1."""
    apart_s: float
    """Time from the kill of the first group to that of the second, or from the moment at which a group is seen to learn
    to the fault; else 0."""
    pause_s: float
    """For how long the process is stopped; 0 for a kill."""
    fatal: bool
    """Whether the groups that it strikes may be lost by it."""


def schedule(
    seed: int,
    duration_s: float,
    groups: int,
    group_size: int,
    mean_gap_s: float,
    heartbeat_s: float,
    table: Mapping[Kind, int] = WEIGHTS,
) -> tuple[Fault, ...]:
    """The faults of ``duration_s``, with exponential gaps. ``heartbeat_s`` is the job's heartbeat time-out; ``table``
    says how often each kind is drawn."""
    draw, at_s = random.Random(seed), 0.0
    kinds, weights = list(table), list(accumulate(table.values()))
    faults: list[Fault] = []
    while True:
        at_s += draw.expovariate(1 / mean_gap_s)
        mark, first, second, position, apart, short, length = (draw.random() for _ in range(7))
        if at_s >= duration_s:
            return tuple(faults)
        kind = next(kind for kind, upto in zip(kinds, weights, strict=True) if mark * weights[-1] < upto)
        group = int(first * groups)
        other = (group + 1 + int(second * (groups - 1))) % groups
        low, high = SHORT if short < 0.5 else LONG
        two = kind is Kind.KILL_TWO_GROUPS and groups > 1
        nobody = (*OF_THE_COORDINATOR, *HUNTS, *OF_ALL)
        struck = () if kind in nobody else (group, other) if two else (group,)
        lasts = kind in (*PAUSES, *OF_ALL, Kind.HOLD_LOCK, Kind.CUT, Kind.FLAP, Kind.RESET)
        many = group_size if kind in OF_ONE_RANK else WHICH if kind in OF_ALL else 0
        if kind in OF_ALL:
            low, high = SHORT
        fault = Fault(
            at_s=at_s,
            kind=kind,
            groups=struck,
            position=int(position * many) if many else -1,
            apart_s=apart * (HUNT_S if kind in HUNTS else APART_S if two else 0.0),
            pause_s=(low + length * (high - low)) * heartbeat_s if lasts else 0.0,
            fatal=kind in ENDS or (kind not in (*OF_THE_COORDINATOR, *OF_ALL) and (not lasts or (low, high) == LONG)),
        )
        faults.append(fault)


def covers(groups: Collection[int], hosts: Sequence[Sequence[int]]) -> bool:
    """Whether each shard has a host among ``groups``; ``hosts``: those of each shard."""
    return all(any(int(host) in groups for host in of_shard) for of_shard in hosts)
