"""Carries the schedule of a soak out on a job's processes, and notes what became of each fault.

It strikes by the process ids of processes.json, never by names. A fault is left out, and counted, where nobody is there
to be struck; where the groups that would be left unhurt do not host every shard, or have no compared copy of a state
shard, for that would be a wipe-out; and where spare-launch would not start the coordinator once more.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks._chaos import HUNTS, OF_ALL, OF_LINKS, OF_THE_COORDINATOR, OF_WEATHER, PAUSES, Fault, Kind, covers
from benchmarks._weather import Undo, Weather
from spare_megatron.launch.coordinator_restarts import CoordinatorRestarts
from spare_megatron.runtime.run_directory import glance

DONE, NOBODY, WIPE_OUT, NO_MORE = "done", "nobody was there", "would be a wipe-out", "the coordinator's restarts"
STEPS_TO_BE_WELL = 3
"""A group counts as unhurt when so many steps have been committed since it was first seen as a member."""
RECOVER_S = 1.0
"""How long after a short pause a group counts as hurt."""
HUNTED_S = 30.0
"""How long a fault waits for a group that learns."""

Member = tuple[int, int]
"""(group, incarnation)."""


@dataclass
class Strikes:
    """Strikes one job."""

    run_dir: Path
    faults: Sequence[Fault]
    hosts: Sequence[Sequence[int]]
    """The groups that host each shard."""
    clock: Callable[[], float]
    """Seconds since the schedule began."""
    weather: Weather | None = None
    """What it strikes with beside signals."""
    outcomes: Counter[tuple[Kind, str]] = field(default_factory=Counter)
    """(kind, what became of it) -> how many faults."""
    hurt: set[Member] = field(default_factory=set)
    """Those that a fault may have ended."""
    ends: set[Member] = field(default_factory=set)
    """Ring neighbours of a group whose ports were struck: at a link that breaks again and again nobody can say which of
    its ends is to blame, so either may be lost."""
    _first_seen: dict[Member, int] = field(default_factory=dict)
    """Member -> the last committed step when it was first seen as one."""
    _mends_s: dict[Member, float] = field(default_factory=dict)
    _restarts: CoordinatorRestarts = field(default_factory=CoordinatorRestarts)
    _next: int = 0
    _due: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _hunts: list[Fault] = field(default_factory=list)
    """Those that wait for a group that learns."""
    _stopped: dict[psutil.Process, int] = field(default_factory=dict)
    """Process -> by how many faults it is stopped."""
    _undone: dict[int, Undo] = field(default_factory=dict)
    """What ends the weather that lasts."""
    _order: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def carried_out(self) -> int:
        """Faults that struck."""
        return sum(n for (_, outcome), n in self.outcomes.items() if outcome == DONE)

    @property
    def skipped(self) -> Counter[str]:
        """Why faults were left out -> how many."""
        found: Counter[str] = Counter()
        for (_, outcome), n in self.outcomes.items():
            found[outcome] += n if outcome != DONE else 0
        return +found

    @property
    def returns(self) -> int:
        """Groups that were seen to have come back."""
        groups = Counter(group for group, _ in self._first_seen)
        return sum(n - 1 for n in groups.values())

    def look(self) -> dict[str, Any]:
        """Read the job's status, and note who is a member now. Those that are asked to leave are not unhurt."""
        status = glance(self.run_dir / "status.json") or {}
        self.hurt |= {one for one in members(status) if one[0] in status.get("drained", ())}
        for member in members(status):
            self._first_seen.setdefault(member, status["step"])
        return status

    def act(self) -> None:
        """Carry out what is due by now."""
        now_s = self.clock()
        while self._due and self._due[0][0] <= now_s:
            heapq.heappop(self._due)[2]()
        while self._next < len(self.faults) and self.faults[self._next].at_s <= now_s:
            fault = self.faults[self._next]
            self._next += 1
            if fault.kind in HUNTS:
                self._hunts.append(fault)
            else:
                self._strike(fault)
        learners = sorted(map(int, self.look().get("learners", ()))) if self._hunts else []
        for fault in [fault for fault in self._hunts if learners or fault.at_s + HUNTED_S <= now_s]:
            self._hunts.remove(fault)
            found = replace(fault, groups=tuple(learners[:1]))
            self._later(fault.apart_s, partial(self._strike, found))

    def end(self) -> None:
        """Let everything go on that is stopped, and forget what is still to come."""
        self._next, self._due, self._hunts = len(self.faults), [], []
        for number in list(self._undone):
            self._undo(number)
        for process in self._stopped:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
        self._stopped.clear()

    def _strike(self, fault: Fault) -> None:
        status = self.look()
        if fault.kind in OF_ALL:
            outcome = self._all(fault)
        else:
            outcome = self._coordinator(fault) if fault.kind in OF_THE_COORDINATOR else self._groups(fault, status)
        self.outcomes[fault.kind, outcome] += 1
        self._note(fault, outcome, status)

    def _coordinator(self, fault: Fault) -> str:
        listed = glance(self.run_dir / "processes.json") or {}
        process = process_of((listed.get("coordinator") or {}).get("pid"))
        if process is None:
            return NOBODY
        if fault.kind is Kind.PAUSE_COORDINATOR:
            self._pause(process, fault.pause_s)
            return DONE
        if not self._restarts.another(self.clock()):
            return NO_MORE
        process.kill()
        return DONE

    def _all(self, fault: Fault) -> str:
        listed = glance(self.run_dir / "processes.json") or {}
        pids = [(listed.get("coordinator") or {}).get("pid"), *(one["pid"] for one in listed.get("ranks", []))]
        return self._with_weather(fault, [], [one for one in map(process_of, pids) if one is not None])

    def _with_weather(self, fault: Fault, struck: list[psutil.Process], others: list[psutil.Process]) -> str:
        assert self.weather is not None, "such faults are drawn for jobs that have a weather"
        try:
            undo = self.weather.strike(fault, struck, others)
        except (OSError, psutil.Error, ZeroDivisionError):
            return NOBODY
        self._undone[next(self._order)] = undo
        number = max(self._undone)
        self._later(fault.pause_s, lambda: self._undo(number))
        return DONE

    def _undo(self, number: int) -> None:
        undo = self._undone.pop(number, None)
        if undo is not None:
            with contextlib.suppress(OSError):
                undo()

    def _groups(self, fault: Fault, status: dict[str, Any]) -> str:
        listed = (glance(self.run_dir / "processes.json") or {}).get("ranks", [])
        there = {group: [one for one in listed if one["group"] == group] for group in fault.groups}
        if not there or not all(there.values()):
            return NOBODY
        if not covers(self.unhurt(status) - set(fault.groups), [*self.hosts, *state_hosts(status)]):
            return WIPE_OUT
        struck = [self._struck(fault, there[group]) for group in fault.groups]
        if not all(struck):
            return NOBODY
        for group in fault.groups:
            member = group, there[group][0]["incarnation"]
            if fault.fatal:
                self.hurt.add(member)
            self._mends_s[member] = self.clock() + fault.pause_s + RECOVER_S
        if fault.kind in OF_LINKS:
            ring = sorted(members(status))
            for group in fault.groups:
                places = [place for place, member in enumerate(ring) if member[0] == group]
                self.ends |= {ring[(place + side) % len(ring)] for place in places for side in (-1, 1)}
        if fault.kind in OF_WEATHER:
            return self._with_weather(fault, struck[0], [])
        if fault.kind in PAUSES:
            self._pause(struck[0][0], fault.pause_s)
        else:
            kill(struck[0])
            for later in struck[1:]:
                self._later(fault.apart_s, partial(kill, later))
        return DONE

    def unhurt(self, status: dict[str, Any]) -> set[int]:
        """Groups that train, and that no fault has touched."""
        now_s, step = self.clock(), status.get("step", 0)
        return {
            member[0]
            for member in members(status)
            if member not in self.hurt
            and self._mends_s.get(member, 0.0) <= now_s
            and (self._first_seen[member] == 0 or step >= self._first_seen[member] + STEPS_TO_BE_WELL)
        }

    @staticmethod
    def _struck(fault: Fault, ranks: list[dict[str, Any]]) -> list[psutil.Process]:
        """The processes of a group that the fault strikes; none where one of them is gone."""
        if fault.kind is Kind.PAUSE_LEADER:
            first = process_of(next((one["pid"] for one in ranks if one["position"] == 0), None))
            leader = leader_of(first)
            return [leader] if leader is not None else []
        wanted = [one["pid"] for one in ranks if fault.position in (-1, one["position"])]
        processes = [process_of(pid) for pid in wanted]
        return [one for one in processes if one is not None] if all(processes) else []

    def _pause(self, process: psutil.Process, pause_s: float) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.suspend()
        self._stopped[process] = self._stopped.get(process, 0) + 1
        self._later(pause_s, lambda: self._resume(process))

    def _resume(self, process: psutil.Process) -> None:
        self._stopped[process] -= 1
        if not self._stopped[process]:
            del self._stopped[process]
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

    def _later(self, after_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.clock() + after_s, next(self._order), act))

    def _note(self, fault: Fault, outcome: str, status: dict[str, Any]) -> None:
        line = {
            "at_s": round(fault.at_s, 3),
            "struck_s": round(self.clock(), 3),
            "step": status.get("step"),
            "fault": fault.kind.value,
            "groups": fault.groups,
            "position": fault.position,
            "pause_s": round(fault.pause_s, 3),
            "outcome": outcome,
            "live": status.get("live"),
        }
        with (self.run_dir / "faults.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


def members(status: dict[str, Any]) -> set[Member]:
    """Those that the job's status names."""
    return {(int(group), incarnation) for group, incarnation in status.get("live", {}).items()}


def state_hosts(status: dict[str, Any]) -> list[list[int]]:
    """Of each state shard the groups whose copies count, in a job that divides the optimizer's state."""
    copies = status.get("state_copies")
    return list(copies["hosts"].values()) if copies else []


def process_of(pid: int | None) -> psutil.Process | None:
    """The process of this id, if there is one."""
    try:
        return None if pid is None else psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


def leader_of(first: psutil.Process | None) -> psutil.Process | None:
    """The leader's process of the group whose position 0 is ``first``."""
    try:
        children = first.children() if first is not None else []
        return next((one for one in children if "leader_process" in " ".join(one.cmdline())), None)
    except psutil.NoSuchProcess:
        return None


def kill(processes: Sequence[psutil.Process]) -> None:
    """SIGKILL, unless they have ended."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
