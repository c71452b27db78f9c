"""Runs one job attempt under Slurm, as two steps of its allocation.

One step has a few coordinator processes on different nodes, of which one holds the lease
(:mod:`spare_megatron.coordinator.election`); when its node dies, another one takes over, and no rank restarts. The
other step has the ranks; when a node is lost, only the groups on it are lost (``--no-kill``). Lost groups are started
again as further steps (:mod:`spare_megatron.launch.slurm_groups`).
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from spare_megatron.config.allocation import Allocation, kept_variables
from spare_megatron.config.errors import ConfigError
from spare_megatron.config.exits import ExitCode, status_words
from spare_megatron.control_plane.channel import security_of
from spare_megatron.coordinator.terms import Term, Terms
from spare_megatron.flags.launcher_flags import LauncherFlags
from spare_megatron.launch.attempt_report import LINES_SHOWN, code_of, end_of_first, refusal_of_coordinator, tail
from spare_megatron.launch.coordinator_client import CoordinatorClient
from spare_megatron.launch.coordinator_restarts import CoordinatorRestarts
from spare_megatron.launch.group_restarts import LaunchMemory
from spare_megatron.launch.job_attempt import END_GRACE_S
from spare_megatron.launch.lent_nodes import LentNodes
from spare_megatron.launch.processes import Child, Processes
from spare_megatron.launch.rank_process import saved_before
from spare_megatron.launch.restart_checkpoint import OwnCheckpoints
from spare_megatron.launch.slurm_commands import SRUN, kill_steps
from spare_megatron.launch.slurm_groups import SlurmGroups, SlurmRanks
from spare_megatron.runtime.awake_clock import AwakeClock
from spare_megatron.runtime.disk import with_retries
from spare_megatron.runtime.run_directory import CoordinatorAddress, RunDirectory, glance

POLL_S = 0.1
GAP_S = 1.0
"""Longer between two looks the launcher was stopped, as Slurm stops a whole job (``scontrol suspend``, time slices)."""
RESTART_PAUSE_S = 1.0
STALE_LEASES = 4
"""After so many leases without a sign of any coordinator more coordinators are started."""
WITHOUT_RANKS_S = 15.0
"""How long a coordinator has to end a job whose step of ranks has ended, while it names no group that trains."""
STEPS_END_S = 30.0
"""How long the processes of a job attempt have to end once they are killed."""
STEP = (*SRUN, "--no-kill", "--open-mode=append")


@dataclass(frozen=True)
class SlurmLaunch:
    """A job to start in a Slurm allocation, and how."""

    allocation: Allocation
    run_dir: RunDirectory
    command: tuple[str, ...]
    """The command line of one rank."""
    group_size: int
    candidates: int
    lease_s: float
    coordinator: tuple[str, ...]
    """The command of a coordinator process, without its arguments: the number of the job attempt and ``words``."""
    words: tuple[str, ...]
    """The batch script's own command line."""
    flags: LauncherFlags = field(default_factory=LauncherFlags)
    """What the flags of a rank say to its launcher; of ``group_size``, that above counts."""
    srun_options: tuple[str, ...] = ()
    requeue: bool = True
    listen: str = "0.0.0.0:0"
    """Where coordinators, and the server for lent nodes, listen."""
    tls_dir: str = ""
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))


def first_nodes(allocation: Allocation) -> tuple[str, ...]:
    """The options of srun that keep a step off the spare nodes."""
    used = allocation.nodes_used
    return (f"--nodes={used}", "--relative=0") if used < allocation.num_nodes else ()


def own_checkpoints(launch: SlurmLaunch) -> OwnCheckpoints:
    """Those of the Slurm job, or of its array: what stays the same when Slurm starts it again."""
    return OwnCheckpoints(launch.run_dir, launch.allocation.array or launch.allocation.job)


class SlurmAttempt:
    """One job attempt, from the start of its coordinators and ranks until a coordinator has reported how it ended."""

    def __init__(
        self,
        launch: SlurmLaunch,
        processes: Processes,
        memory: LaunchMemory,
        announce: Callable[[str], None],
        lent: LentNodes,
    ) -> None:
        """``announce`` shows one line to the user, behind the launcher's name; ``lent`` are the nodes that others
        lend."""
        self._launch, self._dir, self._processes, self._announce = launch, launch.run_dir, processes, announce
        self._memory, self._lent = memory, lent
        self._terms = Terms(self._dir)
        newest, published = with_retries(self._terms.newest), with_retries(self._dir.coordinator_for_sure)
        self._before = published.fencing if published else 0
        self._number = 1 + max(newest.job_attempt if newest else 0, published.job_attempt if published else 0)
        self._step_name = f"spare-life-{self._number}"
        security = security_of(self._dir, launch.tls_dir, create=True)
        self._client = CoordinatorClient(self._dir, security, lambda: self._status is not None)
        self._coordinators: Child | None = None
        self._ranks: Child | None = None
        self._groups: SlurmGroups | None = None
        self._restarts = CoordinatorRestarts()
        self._last_start_s = 0.0
        self._status: int | None = None

    async def run(self, stop_reason: str) -> ExitCode:
        """Run the job attempt until a coordinator has ended it and the ranks have left, or had the time to; returns how
        it ended.

        ``stop_reason``: why the job attempt is to end at once, if it is. Raises ConfigError where any process found a
        user's error."""
        try:
            self._start_coordinators()
            if stop_reason:
                self.request_stop(stop_reason)
            self._status = await self._until_over()
            await self._let_ranks_leave()
        finally:
            self._lent.user = None
            self._lent.kill_all()
            self._client.close()
        return code_of(self._status)

    def request_stop(self, reason: str) -> None:
        """Ask the coordinator to save and leave."""
        self._client.request_stop(reason, lambda: None)  # Slurm has signalled coordinators and ranks itself

    async def end_steps(self) -> bool:
        """End whatever is left of the job attempt, so that the allocation is free for another one; False where that
        takes too long. A coordinator that was left would compete for the lease in the next job attempt."""
        steps = [child for child in (self._coordinators, self._ranks) if child is not None]
        steps += self._groups.children if self._groups is not None else []
        deadline_s = time.monotonic() + STEPS_END_S
        while not await asyncio.to_thread(kill_steps, self._launch.allocation.job, self._step_name):
            if time.monotonic() > deadline_s:
                return False
            await asyncio.sleep(POLL_S)
        for child in steps:
            if child.alive:
                child.signal(signal.SIGKILL)  # an srun whose step is gone or never began
        while any(child.alive for child in steps):
            await asyncio.sleep(POLL_S)
        return True

    def why_failed(self) -> str:
        """Why the job attempt failed, where its coordinator gave no reason."""
        logs = sorted((self._dir.logs / "tasks").glob("*.log"), key=lambda path: int(path.stem))
        return end_of_first(
            (self._dir.coordinator_errors, *logs, self._dir.logs / "srun-ranks.log"), f"see {self._dir.logs}"
        )

    # ---------------------------------------------------------------------------------------------------------- steps

    def _start_coordinators(self) -> None:
        launch, count = self._launch, min(self._launch.candidates, self._launch.allocation.num_nodes)
        self._last_start_s = time.monotonic()
        self._coordinators = self._processes.start(
            "coordinators",
            [
                *(*STEP, f"--job-name={self._step_name}"),
                *("--overlap", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1"),
                *(*launch.coordinator, "--life", str(self._number), *launch.words),
            ],
            {**launch.environ, **kept_variables(launch.environ)},
            self._dir.logs / "srun-coordinators.log",
            ended=lambda _: None,
        )

    def _start_ranks(self, published: CoordinatorAddress) -> None:
        launch = self._launch
        # of an earlier start, which may have died
        saved_step = own_checkpoints(launch).begin(launch.flags, self._announce)
        self._link_logs()
        groups = launch.allocation.ranks // launch.group_size
        incarnation = self._memory.incarnations.first(groups, published.highest_incarnation)
        environ = {
            **launch.environ,
            "PYTHONUNBUFFERED": "1",
            "SPARE_RUN_DIR": str(self._dir.path),
            "SPARE_GROUP_SIZE": str(launch.group_size),
            "SPARE_STARTS_AGAIN": "1",
            "SPARE_LIFE": str(self._number),
            **saved_before(saved_step),
            "SPARE_INCARNATION": str(incarnation),
            "SPARE_TLS_DIR": launch.tls_dir,
        }
        self._ranks = self._processes.start(
            "ranks",
            [
                *(
                    *STEP,
                    "--distribution=block",
                    f"--ntasks={launch.allocation.ranks}",
                    *first_nodes(launch.allocation),
                ),
                *(f"--output={self._dir.logs / 'tasks' / '%t.log'}", *launch.srun_options),
                *(f"--job-name={self._step_name}", *launch.command),
            ],
            environ,
            self._dir.logs / "srun-ranks.log",
            ended=self._ranks_ended,
        )
        ranks = SlurmRanks(
            allocation=launch.allocation,
            run_dir=self._dir,
            group_size=launch.group_size,
            pipeline=launch.flags.pipeline,
            command=launch.command,
            srun_options=launch.srun_options,
            health_check=launch.flags.health_check,
            job_attempt=self._number,
            step_name=self._step_name,
            environ=environ,
        )
        self._groups = SlurmGroups(
            ranks,
            incarnation,
            self._processes,
            self._client,
            memory=self._memory,
            announce=self._announce,
            over=lambda: self._status is not None,
            first_alive=lambda: self._first_alive() or self._trains(),
            lent=self._lent,
        )
        self._client.beside(self._groups.watch())

    def _first_alive(self) -> bool:
        return self._ranks is not None and self._ranks.alive

    def _trains(self) -> bool:
        """Whether groups train: ranks outlive an srun that is killed."""
        status = glance(self._dir.status) or {"phase": "", "life": 0, "live": {}}
        return (status["phase"], status["life"]) == ("running", self._number) and bool(status["live"])

    def _ranks_ended(self, srun: Child) -> None:
        """The step of the ranks has ended, or only its srun was killed."""
        if srun.status is not None and srun.status < 0 and self._trains():
            self._announce(
                f"the srun of the ranks was {status_words(srun.status)}; they train on unless Slurm ends their step"
            )

    def _ranks_alive(self) -> bool:
        return self._first_alive() or (self._groups is not None and self._groups.alive)

    def _link_logs(self) -> None:
        """Make links with spare-launch's names of the ranks' logs, which Slurm names after its tasks."""
        size = self._launch.group_size
        (self._dir.logs / "tasks").mkdir(parents=True, exist_ok=True)
        for task in range(self._launch.allocation.ranks):
            link = self._dir.log_of(*divmod(task, size))
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.is_symlink():
                link.symlink_to(Path("..") / "tasks" / f"{task}.log")

    # --------------------------------------------------------------------------------------------------------- course

    async def _until_over(self) -> int:
        """Wait until a coordinator has ended the job attempt, or none is left that could; returns the exit code of the
        job attempt."""
        seen: Term | None = None
        moved_s = time.monotonic()
        clock = AwakeClock(moved_s, GAP_S)
        ranks_gone_s: float | None = None
        while True:
            newest, now_s = self._newest(seen), clock.at(time.monotonic())
            if newest != seen:
                seen, moved_s = newest, now_s
            if newest is not None and newest.job_attempt == self._number and newest.over is not None:
                return self._checked(newest.over)
            sentences = self._dir.reported_errors() if self._groups is None else self._groups.errors()
            if sentences:
                raise ConfigError(tail(sentences[0], LINES_SHOWN))
            published = self._dir.coordinator()
            if self._ranks is None and published is not None and published.fencing > self._before:
                self._start_ranks(published)
            gone = self._ranks is not None and not self._ranks_alive() and not self._trains()
            ranks_gone_s = ranks_gone_s or now_s if gone else None
            if ranks_gone_s is not None and now_s - ranks_gone_s > WITHOUT_RANKS_S:
                return int(ExitCode.FAILED)
            if not self._keep_coordinators(now_s - moved_s):
                return int(ExitCode.FAILED)
            await asyncio.sleep(POLL_S)

    def _keep_coordinators(self, silent_s: float) -> bool:
        """Start more coordinators when their step has ended, or when all are silent, for ``silent_s`` in which this
        process ran; False when that was done too often. They outlive an srun that was killed."""
        since_s, srun = time.monotonic() - self._last_start_s, self._coordinators
        assert srun is not None
        killed = srun.status is not None and srun.status < 0
        ended = not srun.alive and since_s > RESTART_PAUSE_S and not (killed and silent_s < self._launch.lease_s)
        stale_s = STALE_LEASES * self._launch.lease_s
        if not ended and (silent_s < stale_s or since_s < stale_s):
            return True
        if not self._restarts.another(time.monotonic()):
            return False
        self._announce("no coordinator is left; others are started")
        self._start_coordinators()
        return True

    def _checked(self, code: int) -> int:
        if code == ExitCode.BAD_INPUT:
            raise ConfigError(refusal_of_coordinator(self._dir))
        return code

    def _newest(self, seen: Term | None) -> Term | None:
        """The present term; where it cannot be read now, the one that was seen last."""
        try:
            return self._terms.newest()
        except (OSError, ValueError):
            return seen

    async def _let_ranks_leave(self) -> None:
        """Wait until the ranks have left, for :data:`END_GRACE_S` at most: srun may wait long for those of a lost
        node."""
        deadline_s = time.monotonic() + END_GRACE_S
        while self._ranks_alive() and time.monotonic() < deadline_s:
            await asyncio.sleep(POLL_S)
