"""Starts single processes of a job: ranks of groups, and such as wait for a place."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from spare_megatron.config.injection import VARIABLE
from spare_megatron.config.place import PLACE_FILE, STAGES
from spare_megatron.config.rows import ranks_with
from spare_megatron.launch.group_restarts import GroupStart
from spare_megatron.launch.local_job import Launch
from spare_megatron.launch.processes import Child, Fork, Processes
from spare_megatron.runtime.run_directory import RunDirectory, waits_file, write_json

BLAS_THREADS = "OPENBLAS_NUM_THREADS"
"""Without it numpy, when it is imported, starts as many threads as OMP_NUM_THREADS says, and nothing can be forked.
With another number its sums have other bits, so ranks that are not forked have it too."""


@dataclass(frozen=True)
class RankProcess:
    """One rank of one start of a group."""

    start: GroupStart
    position: int
    log: Path
    child: Child


@dataclass
class WaitingProcess:
    """A process that waits for a place."""

    name: str
    """such as 'standby-0': of its place's file."""
    position: int
    """In its standby."""
    log: Path
    child: Child
    rank: RankProcess | None = None
    """What it is since it got a place."""

    def became(self, start: GroupStart, position: int, run_dir: RunDirectory) -> RankProcess:
        """Note its place, and let the rank's log have its usual name too; returns the rank."""
        self.rank = RankProcess(start, position, self.log, self.child)
        link = run_dir.log_of(start.group, position, start.incarnation)
        with contextlib.suppress(OSError):  # the log has its own name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.unlink(missing_ok=True)
            link.symlink_to(os.path.relpath(self.log, link.parent))
        return self.rank


class RankStarter:
    """Starts the processes of one job attempt."""

    def __init__(
        self,
        launch: Launch,
        processes: Processes,
        job_attempt: int,
        ended: Callable[[GroupStart, int, Child], None],
        fork: Fork,
    ) -> None:
        """``ended`` is called with the position of each rank that has ended, whatever it began as; ``fork`` is asked
        first to start each."""
        self._launch, self._processes, self._job_attempt, self._ended = launch, processes, job_attempt, ended
        self._fork = fork
        self.saved_step: int | None = None
        """The step of the newest checkpoint that the job has saved itself before this job attempt."""

    def rank(self, start: GroupStart, position: int, slot: int) -> RankProcess:
        """Start a rank of a group. Raises OSError."""
        later = start.incarnation if start.restarts else None
        log = self._launch.run_dir.log_of(start.group, position, later)
        child = self._processes.start(
            f"group {start.group} rank {position}",
            self._launch.command,
            {**self._common(), **place_of_start(start), **self.seat(position, slot, start.first)},
            log,
            ended=lambda child: self._ended(start, position, child),
            fork=self._fork,
        )
        return RankProcess(start, position, log, child)

    def ranks_of(self, start: GroupStart) -> int:
        """How many ranks a start of a group has."""
        return ranks_with(self._launch.group_size, self._launch.flags.pipeline, start.stages)

    def standby(
        self, name: str, slot: int, ended: Callable[[WaitingProcess], None], made: list[WaitingProcess]
    ) -> None:
        """Start the ranks of a standby, and put each into ``made``; ``ended`` is called for each that ends without a
        place. Raises OSError where not all could be started."""
        for position in range(self._launch.group_size):
            # to a checkpoint it is as a group that is started again: it loads none
            environ = {**self.seat(position, slot), "SPARE_RESTARTS": "1"}
            made.append(self._waiting(name, position, environ, ended))

    def seat(self, position: int, slot: int, first: int = 0) -> dict[str, str]:
        """The environment of a position in a slot, from its ``first`` device on."""
        device = slot * self._launch.group_size + first + position
        return {"SPARE_POSITION": str(position), "LOCAL_RANK": str(device)}

    def _waiting(
        self, name: str, position: int, environ: dict[str, str], ended: Callable[[WaitingProcess], None]
    ) -> WaitingProcess:
        run_dir = self._launch.run_dir
        place, log = run_dir.place_file(name), run_dir.standby_log(name, position)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.unlink(missing_ok=True)  # of an earlier launch

        def has_ended(child: Child) -> None:
            if made.rank is not None:
                self._ended(made.rank.start, made.rank.position, child)
            else:
                ended(made)

        child = self._processes.start(
            f"{name} rank {position}",
            self._launch.command,
            {**self._common(), **environ, PLACE_FILE: str(place)},
            log,
            ended=has_ended,
            fork=self._fork,
        )
        made = WaitingProcess(name, position, log, child)
        return made

    def _common(self) -> dict[str, str]:
        launch = self._launch
        return {
            "OMP_NUM_THREADS": "1",
            BLAS_THREADS: "1",
            **launch.environ,
            "PYTHONUNBUFFERED": "1",
            "LOCAL_WORLD_SIZE": str((launch.num_groups + launch.flags.standby_groups) * launch.group_size),
            "SPARE_NUM_GROUPS": str(launch.num_groups),
            "SPARE_GROUP_SIZE": str(launch.group_size),
            "SPARE_LIFE": str(self._job_attempt),
            **saved_before(self.saved_step),
            "SPARE_RUN_DIR": str(launch.run_dir.path),
            "SPARE_LAUNCHER_PID": str(os.getpid()),
            "SPARE_STARTS_AGAIN": "1",
            "SPARE_TLS_DIR": launch.tls_dir,
            VARIABLE: "\n".join(launch.injections),
        }


def saved_before(step: int | None) -> dict[str, str]:
    """The environment of the ranks of a job attempt before which the job itself has saved ``step``, or nothing."""
    return {"SPARE_SAVED_STEP": "" if step is None else str(step)}


def place_of_start(start: GroupStart) -> dict[str, str]:
    """The environment of a start of a group."""
    return {
        "SPARE_GROUP": str(start.group),
        "SPARE_INCARNATION": str(start.incarnation),
        "SPARE_RESTARTS": str(start.restarts),
        **({STAGES: str(start.stages)} if start.stages else {}),
    }


def give_place(run_dir: RunDirectory, name: str, environ: dict[str, str]) -> None:
    """Give whoever waits under ``name`` its place, as variables of its environment. Raises OSError where nobody knows
    whether it has it."""
    write_json(run_dir.place_file(name), {"environ": environ})


def waits_since_s(run_dir: RunDirectory, waiting: Sequence[WaitingProcess]) -> float | None:
    """When the last of these processes began to wait, in Unix time; None where one does not yet."""
    try:
        return max(waits_file(run_dir.place_file(one.name), one.child.pid).stat().st_mtime for one in waiting)
    except OSError:
        return None


def end(waiting: Iterable[WaitingProcess]) -> None:
    """Kill these processes."""
    for one in waiting:
        if one.child.alive:
            one.child.signal(signal.SIGKILL)
