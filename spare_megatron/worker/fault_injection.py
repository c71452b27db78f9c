"""Injects faults into a rank: real signals to real processes, at a named moment of a named step.

Each injection happens once in a job, even when its step is computed again from a checkpoint: a mark file is made in the
run directory before the fault, so that it is there although the process is killed. It strikes only the processes of one
start of its group (``Injection.restart``): a group that is started again is left alone unless the injection says so.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.injection import VARIABLE, Injection, parse_injection
from spare_megatron.config.place import Place
from spare_megatron.runtime import failpoints
from spare_megatron.runtime.disk import words
from spare_megatron.runtime.run_directory import RunDirectory, glance

LOOK_S = 0.05
"""Time between two looks at status.json of a rank that waits for a group."""


class InjectedError(RuntimeError):
    """The exception of ``--inject exception``."""


class Injector:
    """Injects the faults that the user asked for with ``--inject`` into one rank."""

    def __init__(
        self, injections: Sequence[Injection], group: int, position: int, run_dir: RunDirectory, restarts: int = 0
    ) -> None:
        """``restarts``: how often the group was started again before this rank, in this job attempt."""
        self._run_dir, self.injections = run_dir, tuple(injections)
        self._aim(group, position, restarts)
        self._placed = True
        self._dragged = (0, 0.0)
        """The step in which the slowness was last looked at, and the CPU time of the training thread then."""
        self._lasting: set[int] = set()
        """The injections that last and have begun."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], place: Place) -> Injector:
        """An injector of what was given to spare-launch with ``--inject``; raises ConfigError where it is not
        understood."""
        texts = environ.get(VARIABLE, "").splitlines()
        injections = [parse_injection(text) for text in texts if text]
        if injections and place.run_dir is None:
            raise ConfigError("--inject needs a run directory; give --spare-run-dir DIR or set SPARE_RUN_DIR")
        made = cls(injections, place.group, place.position, RunDirectory(place.run_dir or "."), place.restarts)
        if place.place_file:
            made._mine, made._placed = [], False
        return made

    def move(self, place: Place) -> None:
        """A standby, which no fault strikes while it waits, has got its place."""
        self._aim(place.group, place.position, place.restarts)
        self._placed = True

    def _aim(self, group: int, position: int, restarts: int) -> None:
        self._group, self._position = group, position
        self._mine = [
            (index, one)
            for index, one in enumerate(self.injections)
            if one.group == group and one.position in (None, position) and one.restart == restarts
        ]

    def fire(self, point: str, step: int, n: int) -> None:
        """Inject what is due at ``point``. Called wherever faults can be injected; nearly always returns at once."""
        if not self._mine:
            return
        if point in ("forward", "backward", "patch"):
            self._drag(step)
        for index, one in self._mine:
            if (
                one.kind != "bitflip"
                and one.matches(self._group, self._position, point, step, n)
                and self._take(index, one)
            ):
                self._do(one)

    def slowness(self, step: int) -> float:
        """The factor by which pieces take longer on this rank. An engine that only simulates computing multiplies its
        times by it; for one that computes, :meth:`fire` sleeps."""
        factor = 1.0
        for index, one in self._mine:
            if one.factor > 1 and step >= one.step:
                if index not in self._lasting:
                    self._lasting.add(index)
                    self._take(index, one)
                factor *= one.factor
        return factor

    def _drag(self, step: int) -> None:
        """Sleep for (slowness - 1) times the time for which this thread has computed since the last call in this
        step."""
        factor, computed_s = self.slowness(step), time.thread_time()
        if factor > 1 and self._dragged[0] == step:
            time.sleep((factor - 1) * (computed_s - self._dragged[1]))
        self._dragged = step, computed_s

    @property
    def has_flips(self) -> bool:
        """Whether an injection of this rank flips a bit; for a standby that waits for its place, an injection of any
        rank."""
        found = [one for _, one in self._mine] if self._placed else self.injections
        return any(one.kind == "bitflip" for one in found)

    def flips(self, point: str, step: int, n: int = 0) -> bool:
        """Whether a bit is to be flipped here. The caller, which owns the data, flips it."""
        return any(
            one.kind == "bitflip"
            and one.matches(self._group, self._position, point, step, n)
            and self._take(index, one)
            for index, one in self._mine
        )

    def _take(self, index: int, one: Injection) -> bool:
        """Make the mark; true the first time in the job. Position 0 alone injects what strikes its whole group."""
        by_group = one.position is None and one.kind in ("sigkill", "sigstop", "coordinator-sigkill")
        if by_group and self._position != 0:
            return False
        marks = self._run_dir.injected
        try:
            marks.mkdir(parents=True, exist_ok=True)
            failpoints.hit("injected.write")
            os.close(os.open(marks / f"{index}-rank-{self._position}", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
        except OSError as error:
            sys.stderr.write(f"spare: {one.kind} is not injected, its mark cannot be made: {words(error)}\n")
            return False
        return True

    def _do(self, one: Injection) -> None:
        if one.kind == "sigkill":
            self._signal(one, signal.SIGKILL)
        elif one.kind == "sigstop":
            self._signal(one, signal.SIGSTOP)
        elif one.kind == "coordinator-sigkill":
            published = self._run_dir.coordinator()
            if published is not None:
                os.kill(published.pid, signal.SIGKILL)
        elif one.kind == "slow":
            time.sleep(one.seconds)
        elif one.awaited is not None:
            while not is_back(glance(self._run_dir.status) or {}, *one.awaited):
                time.sleep(LOOK_S)
        elif one.kind == "hang":
            threading.Event().wait()
        else:
            raise InjectedError(f"injected at {one.point} of step {one.step}")

    def _signal(self, one: Injection, number: signal.Signals) -> None:
        """Send a signal to this rank, or to all ranks of its group, to this one last."""
        pids = [] if one.position is not None else self._group_pids()
        for pid in pids:
            if pid != os.getpid():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        failpoints.strike_here(number)

    def _group_pids(self) -> list[int]:
        listed = glance(self._run_dir.processes) or {}
        return [rank["pid"] for rank in listed.get("ranks", []) if rank["group"] == self._group]


def is_back(status: Mapping[str, Any], group: int, incarnation: int) -> bool:
    """Whether, by status.json, this incarnation of the group, or a later one, is a member or can take the state that
    others give after a step; True once the job is over."""
    member, known = (status.get(name, {}).get(str(group), -1) >= incarnation for name in ("live", "learners"))
    return bool(status.get("outcome")) or member or (known and group in status.get("ready", ()))
