"""A job under Slurm: what the batch script runs, and what runs in the step of the coordinators.

The batch script starts two steps. One has a few coordinator processes on different nodes, of which one holds office
(:mod:`spare_megatron.coordinator.election`): when its node dies, another one takes over, and no rank restarts. The
other step has the ranks; a lost node takes its groups, nothing else (``--no-kill``). The batch script passes signals
on and turns the coordinator's last word into an exit code or a place in the queue.

Should the node of the batch script die, both steps go on: Slurm takes the node out of a job with ``--no-kill``. Nobody
would then end the job, so a coordinator process does it that finds itself still alive some time after the end.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from spare_megatron.config.allocation import Allocation
from spare_megatron.config.errors import ConfigError
from spare_megatron.config.exits import ExitCode
from spare_megatron.control import control_pb2 as pb
from spare_megatron.control.channel import Security
from spare_megatron.control.disk import patiently
from spare_megatron.control.run_directory import CoordinatorAddress, RunDirectory, glance, read_json, write_json
from spare_megatron.coordinator.terms import Term, Terms
from spare_megatron.launch.coordinator_client import tell
from spare_megatron.launch.job_attempt import END_GRACE_S, tail
from spare_megatron.launch.processes import Child, Processes
from spare_megatron.launch.restart_checkpoint import checkpoint_to_start_from
from spare_megatron.launch.supervisor import LIVES_WITHOUT_COMMIT

POLL_S = 0.1
COORDINATOR_RESTARTS = 8
RESTART_PAUSE_S = 1.0
STALE_LEASES = 4
"""Leases without a sign of any coordinator after which more are started."""
WITHOUT_RANKS_S = 15.0
"""For a coordinator to end a job whose rank step is gone."""
AFTER_S = 3.0
"""Between two looks for the batch script, after the job's end."""
STEP = ("srun", "--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--export=ALL", "--open-mode=append")
LINES_SHOWN = 12


@dataclass(frozen=True)
class SlurmLaunch:
    """What the batch script wants."""

    allocation: Allocation
    run_dir: RunDirectory
    command: tuple[str, ...]
    """Of one rank."""
    group_size: int
    candidates: int
    lease_s: float
    coordinator: tuple[str, ...]
    """Command of a coordinator process: before it come the steps of Slurm, behind it the life and ``words``."""
    words: tuple[str, ...]
    """The batch script's own command line."""
    checkpoint_dirs: tuple[str, ...] = ()
    srun_options: tuple[str, ...] = ()
    requeue: bool = True
    tls_dir: str = ""
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))


class SlurmJob:
    """One start of the job by Slurm: one life."""

    def __init__(self, launch: SlurmLaunch, notice: Callable[[str], None]) -> None:
        self._launch, self._dir, self._notice = launch, launch.run_dir, notice
        self._dir.create()
        self._terms = Terms(self._dir)
        newest, published = patiently(self._terms.newest), patiently(self._dir.coordinator_for_sure)
        self._before = published.fencing if published else 0
        self._life = 1 + max(newest.life if newest else 0, published.life if published else 0)
        self._security = Security(self._dir.token(create=True), launch.tls_dir)
        self._tasks: set[asyncio.Task[None]] = set()
        self._coordinators: Child | None = None
        self._ranks: Child | None = None
        self._starts = 0
        self._last_start_s = 0.0
        self._stop_reason = ""
        self._code: int | None = None

    async def run(self) -> ExitCode:
        """The job's exit code for this start. Raises ConfigError for a user's error of any process."""
        for path in (self._dir.summary, self._dir.status):
            patiently(partial(path.unlink, missing_ok=True))
        shutil.rmtree(self._dir.errors, ignore_errors=True)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            loop.add_signal_handler(number, self._signal, signal.Signals(number).name)
        with Processes() as processes:
            try:
                self._start_coordinators(processes)
                self._code = await self._until_over(processes)
                await self._let_ranks_leave()
            finally:
                for task in self._tasks:
                    task.cancel()
        return self._last_word(self._code)

    # ---------------------------------------------------------------------------------------------------------- steps

    def _start_coordinators(self, processes: Processes) -> None:
        launch, count = self._launch, min(self._launch.candidates, self._launch.allocation.num_nodes)
        self._starts += 1
        self._last_start_s = time.monotonic()
        self._coordinators = processes.start(
            "coordinators",
            [
                *STEP,
                *("--overlap", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1"),
                *(*launch.coordinator, "--life", str(self._life), *launch.words),
            ],
            launch.environ,
            self._dir.logs / "srun-coordinators.log",
            lambda _: None,
        )

    def _start_ranks(self, processes: Processes, published: CoordinatorAddress) -> None:
        launch = self._launch
        self._link_logs()
        environ = {
            **launch.environ,
            "PYTHONUNBUFFERED": "1",
            "SPARE_RUN_DIR": str(self._dir.path),
            "SPARE_GROUP_SIZE": str(launch.group_size),
            "SPARE_LIFE": str(self._life),
            "SPARE_INCARNATION": str(published.highest_incarnation + 1),
            "SPARE_TLS_DIR": launch.tls_dir,
        }
        self._ranks = processes.start(
            "ranks",
            [
                *(*STEP, "--distribution=block", f"--ntasks={launch.allocation.ranks}"),
                *(f"--output={self._dir.logs / 'tasks' / '%t.log'}", *launch.srun_options, *launch.command),
            ],
            environ,
            self._dir.logs / "srun-ranks.log",
            lambda _: None,
        )

    def _link_logs(self) -> None:
        """Slurm names a rank's log after its task; links give it the name that it has under spare-launch."""
        size = self._launch.group_size
        (self._dir.logs / "tasks").mkdir(parents=True, exist_ok=True)
        for task in range(self._launch.allocation.ranks):
            link = self._dir.log_of(*divmod(task, size))
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.is_symlink():
                link.symlink_to(Path("..") / "tasks" / f"{task}.log")

    # --------------------------------------------------------------------------------------------------------- course

    async def _until_over(self, processes: Processes) -> int:
        """Until the coordinator has said its last word, or nobody is left to say one."""
        seen: Term | None = None
        moved_s = time.monotonic()
        ranks_gone_s: float | None = None
        while True:
            newest, now_s = self._newest(seen), time.monotonic()
            if newest != seen:
                seen, moved_s = newest, now_s
            if newest is not None and newest.life == self._life and newest.over is not None:
                return self._checked(newest.over)
            sentences = self._dir.told_errors()
            if sentences:
                raise ConfigError(tail(sentences[0], LINES_SHOWN))
            published = self._dir.coordinator()
            if self._ranks is None and published is not None and published.fencing > self._before:
                self._start_ranks(processes, published)
            if self._ranks is not None and not self._ranks.alive:
                ranks_gone_s = ranks_gone_s or now_s
                if now_s - ranks_gone_s > WITHOUT_RANKS_S:
                    return int(ExitCode.FAILED)
            if not self._keep_coordinators(processes, now_s - moved_s):
                return int(ExitCode.FAILED)
            await asyncio.sleep(POLL_S)

    def _keep_coordinators(self, processes: Processes, silent_s: float) -> bool:
        """Start more of them when their step has ended, or all their nodes are silent. False: that is no use."""
        since_s = time.monotonic() - self._last_start_s
        assert self._coordinators is not None
        ended = not self._coordinators.alive and since_s > RESTART_PAUSE_S
        stale_s = STALE_LEASES * self._launch.lease_s
        if not ended and (silent_s < stale_s or since_s < stale_s):
            return True
        if self._starts > COORDINATOR_RESTARTS:
            return False
        self._notice("spare-slurm: no coordinator is left; others are started")
        self._start_coordinators(processes)
        return True

    def _checked(self, code: int) -> int:
        if code == ExitCode.BAD_INPUT:
            raise ConfigError(tail(self._dir.coordinator_errors, 1).removeprefix("spare-coordinator: "))
        return code

    def _newest(self, seen: Term | None) -> Term | None:
        """The present term; the one that was seen last where it is not known now."""
        try:
            return self._terms.newest()
        except (OSError, ValueError):
            return seen

    async def _let_ranks_leave(self) -> None:
        """They were told that the job is over; srun itself may wait long for those of a lost node."""
        deadline_s = time.monotonic() + END_GRACE_S
        while self._ranks is not None and self._ranks.alive and time.monotonic() < deadline_s:
            await asyncio.sleep(POLL_S)

    def _signal(self, name: str) -> None:
        """The first one asks for a save. Slurm may send more, and ends by SIGKILL what takes too long."""
        if self._stop_reason:
            return
        self._stop_reason = f"signal {name}"
        self._keep(
            tell(
                self._dir,
                self._security,
                "RequestStop",
                pb.StopRequest(reason=self._stop_reason),
                lambda: self._code is not None,
            )
        )

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ------------------------------------------------------------------------------------------------------- last word

    def _last_word(self, status: int) -> ExitCode:
        """The exit code, after what is to be said and done about it."""
        code = last_word(ExitCode(status), self._launch, self._notice)
        if code is ExitCode.FAILED:
            self._notice("spare-slurm: the job failed; " + self._why_failed())
        if code is ExitCode.REQUEUE and self._launch.requeue:
            queue_again(self._launch.allocation, self._notice)
        elif code is ExitCode.FINISHED:
            end_array(self._launch.allocation)
        self._notice(f"spare-slurm: the job leaves with exit code {int(code)}")
        return code

    def _why_failed(self) -> str:
        reason = (glance(self._dir.summary) or {}).get("reason")
        if reason:
            return str(reason)
        logs = sorted((self._dir.logs / "tasks").glob("*.log"), key=lambda path: int(path.stem))
        for path in (self._dir.coordinator_errors, *logs, self._dir.logs / "srun-ranks.log"):
            if tail(path, 1):
                return f"the end of {path}:\n{tail(path, LINES_SHOWN)}"
        return f"see {self._dir.logs}"


def last_word(code: ExitCode, launch: SlurmLaunch, notice: Callable[[str], None]) -> ExitCode:
    """What a job does about its coordinator's exit code: after a wipe-out or for a planned restart it starts again from
    a checkpoint, where there is one, but not again and again without a committed step."""
    summary = patiently(lambda: read_json(launch.run_dir.summary)) or {}
    if code not in (ExitCode.WIPE_OUT, ExitCode.RESTART):
        return code
    why = summary.get("reason", "every group is lost")
    checkpoint = patiently(
        lambda: checkpoint_to_start_from(launch.run_dir, launch.checkpoint_dirs, notice, "spare-slurm")
    )
    if checkpoint is None:
        where = " or ".join(launch.checkpoint_dirs) or "(no --save or --load was given)"
        notice(f"spare-slurm: {why}; there is no good checkpoint in {where} to start again from")
        return ExitCode.NO_CHECKPOINT
    idle_file = launch.run_dir.path / "idle_lives.json"
    committed = summary.get("steps", 0) > summary.get("first_step", 0)
    idle = 0 if committed else 1 + int((patiently(lambda: read_json(idle_file)) or {}).get("lives", 0))
    patiently(lambda: write_json(idle_file, {"lives": idle}))
    if idle >= LIVES_WITHOUT_COMMIT:
        notice(f"spare-slurm: {why}; {idle} lives of the job ended without a committed step")
        return ExitCode.FAILED
    notice(f"spare-slurm: {why}; the job starts again from {checkpoint}")
    return ExitCode.REQUEUE


def queue_again(allocation: Allocation, notice: Callable[[str], None]) -> None:
    """Back into the queue, unless Slurm is ending the job itself (it was cancelled, or is being queued again) or a
    later element of the job array goes on with it."""
    if allocation.array is not None and not allocation.last_of_array:
        notice("spare-slurm: the next element of the job array goes on")
        return
    state = _slurm("squeue", "--noheader", "--format=%T", f"--jobs={allocation.job}").stdout.strip()
    if state != "RUNNING":
        notice(f"spare-slurm: Slurm has the job in state {state or 'unknown'}: it is not queued again from here")
        return
    notice("spare-slurm: the job is queued again and leaves with exit code 4")
    done = _slurm("scontrol", "requeue", allocation.job)
    if done.returncode:
        notice(f"spare-slurm: it could not be queued again: {done.stderr.strip()}; use sbatch --requeue")


def end_array(allocation: Allocation) -> None:
    """The job is finished: the elements of the array that still wait have nothing to do."""
    if allocation.array is not None and not allocation.last_of_array:
        _slurm("scancel", "--state=PENDING", allocation.array)


def end_without_batch_script(launch: SlurmLaunch, index: int, code: ExitCode, notice: Callable[[str], None]) -> None:
    """In the step of the coordinators, after the job's end: the batch script ends the Slurm job, and this process with
    it; where Slurm has taken the batch script's node out of the job, this process does it. Candidate 0 is the first."""
    while not _batch_script_is_lost(launch.allocation.job):
        time.sleep(AFTER_S * (1 + index))
    notice("spare-slurm: the node of the batch script is lost; this coordinator ends the Slurm job")
    if last_word(code, launch, notice) is ExitCode.REQUEUE and launch.requeue:
        queue_again(launch.allocation, notice)
        return
    end_array(launch.allocation)
    _slurm("scancel", launch.allocation.job)


def _batch_script_is_lost(job: str) -> bool:
    shown = _slurm("scontrol", "--oneliner", "show", "job", job).stdout
    told = dict(word.split("=", 1) for word in shown.split() if "=" in word)
    nodes = _slurm("scontrol", "show", "hostnames", told.get("NodeList", "")).stdout.split()
    return told.get("JobState") == "RUNNING" and bool(nodes) and told.get("BatchHost") not in nodes


def _slurm(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, check=False)
