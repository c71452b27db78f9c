"""Runs a job in a Slurm batch script, and ends the job from a coordinator when the batch script's node is lost.

The batch script runs job attempts (:mod:`spare_megatron.launch.slurm_attempt`) in its allocation, passes signals on,
and does what :mod:`spare_megatron.launch.restart_policy` says after each: leave, begin another job attempt in the same
allocation, or go back into the queue.

When the node of the batch script dies, the job attempt goes on, because with ``--no-kill`` Slurm only takes the node
out of the job. Then the batch script cannot end the job after the job attempt, so a coordinator process does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import replace

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.exits import ExitCode
from spare_megatron.control_plane.channel import security_of
from spare_megatron.launch.attempt_report import ended_attempt, forget_last_attempt, note_end
from spare_megatron.launch.group_restarts import GroupRestarts, Incarnations, LaunchMemory
from spare_megatron.launch.lent_nodes import LentNodes, NodeNeeds
from spare_megatron.launch.node_facts import paths_of
from spare_megatron.launch.only_run import no_other_kind, no_other_slurm_job
from spare_megatron.launch.processes import Processes
from spare_megatron.launch.restart_policy import (
    EndedAttempt,
    JobProgress,
    RestartDecision,
    SlurmFacts,
    Then,
    after_attempt,
    needs_checkpoint,
    slurm_obstacles,
)
from spare_megatron.launch.slurm_attempt import SlurmAttempt, SlurmLaunch, own_checkpoints
from spare_megatron.launch.slurm_commands import (
    ask,
    batch_script_is_lost,
    end_array,
    nodes_answer,
    reported_at_last,
    requeue,
    slurm_queues_again,
    step_names,
    time_left_s,
)
from spare_megatron.launch.slurm_lend import LEND_STEP
from spare_megatron.launch.supervisor import SIGNALS_WAIT_S, on_stop_signals
from spare_megatron.runtime.disk import with_retries
from spare_megatron.runtime.run_directory import read_json, write_json
from spare_megatron.runtime.save_lock import only_job

AFTER_S = 3.0
"""How often the first coordinator looks, after the end of a job attempt, whether the batch script's node is lost."""


class SlurmJob:
    """One start of the batch script, with all job attempts in it."""

    def __init__(self, launch: SlurmLaunch, notice: Callable[[str], None]) -> None:
        """``notice`` shows one line to the user."""
        self._launch, self._dir, self._notice = launch, launch.run_dir, notice
        self._dir.create()
        self._stop_reason = ""
        self._job_attempt: SlurmAttempt | None = None

    async def run(self) -> ExitCode:
        """Run the job; returns the exit code of the batch script. Raises ConfigError where any process found a user's
        error."""
        on_stop_signals(self._signal)
        launch = self._launch
        restarts = GroupRestarts(launch.flags.max_group_restarts, launch.flags.group_restart_pause_s)
        memory = LaunchMemory(restarts, Incarnations())
        lends = LEND_STEP in await asyncio.to_thread(step_names, launch.allocation.job)
        if lends:
            raise ConfigError("this Slurm job lends its nodes to another job; train in a Slurm job of its own")
        await no_other_kind(self._dir, "spare-slurm", shared=True)
        await no_other_slurm_job(own_checkpoints(launch), launch.lease_s)
        security = security_of(self._dir, launch.tls_dir, create=True)
        with only_job(launch.flags.save_dir, self._dir, self._announce), Processes() as processes:
            async with LentNodes(self._dir, security, launch.listen, _needs(launch), self._announce) as lent:
                decision, code = await self._job_attempts(processes, memory, lent)
        return self._leave(decision, code)

    async def _job_attempts(
        self, processes: Processes, memory: LaunchMemory, lent: LentNodes
    ) -> tuple[RestartDecision, ExitCode]:
        while True:
            forget_last_attempt(self._dir)
            job_attempt = self._job_attempt = SlurmAttempt(self._launch, processes, memory, self._announce, lent)
            decision = await self._decide(job_attempt, await job_attempt.run(self._stop_reason))
            if decision.sentence:
                self._announce(decision.sentence)
            if decision.code is not None:
                return decision, decision.code

    async def _decide(self, job_attempt: SlurmAttempt, code: ExitCode) -> RestartDecision:
        """Decide what follows ``job_attempt``. If that is another job attempt, no process of this one is left on
        return."""
        ended = last_attempt(self._launch, code, job_attempt.why_failed, self._announce)
        if not needs_checkpoint(code) and code is not ExitCode.REQUEUE:
            decision = after_attempt(ended)  # does not depend on Slurm
            keep_idle_attempts(self._launch, ended, decision)
            return decision
        may_start = needs_checkpoint(code) and not self._stop_reason and not ended.stop_requested
        facts = await asyncio.to_thread(facts_of, self._launch, may_start)
        decision = await self._decided(ended, facts)
        if decision.then is Then.START_AGAIN:
            facts = replace(facts, left_over=not await job_attempt.end_steps())
            decision = await self._decided(ended, facts)
        keep_idle_attempts(self._launch, ended, decision)
        return decision

    async def _decided(self, ended: EndedAttempt, facts: SlurmFacts) -> RestartDecision:
        await asyncio.sleep(SIGNALS_WAIT_S)
        stop_requested = ended.stop_requested or bool(self._stop_reason)
        return after_attempt(replace(ended, stop_requested=stop_requested, obstacles=slurm_obstacles(facts)))

    def _leave(self, decision: RestartDecision, code: ExitCode) -> ExitCode:
        """Queue the job again, or end its array, as decided; returns the exit code."""
        self._announce(f"the job leaves with exit code {int(code)}")
        if decision.then is Then.QUEUE_AGAIN:
            queue_again(self._launch, self._announce)
            return code
        with contextlib.suppress(OSError):  # for those who look on
            note_end(self._dir, code)
        if code is ExitCode.FINISHED:
            end_array(self._launch.allocation)
        return code

    def _announce(self, text: str) -> None:
        self._notice(f"spare-slurm: {text}")

    def _signal(self, reason: str) -> None:
        """Ask for a save and an end at the first signal. Slurm may send more, and kills a job that takes too long."""
        if self._stop_reason:
            return
        self._stop_reason = reason
        if self._job_attempt is not None:
            self._job_attempt.request_stop(reason)


def _needs(launch: SlurmLaunch) -> NodeNeeds:
    """What a lent node must have."""
    paths = [*paths_of(launch.command[1:]), str(launch.run_dir.path)]
    return NodeNeeds(os.getcwd(), paths, min(launch.group_size, launch.allocation.ranks_per_node))


def last_attempt(
    launch: SlurmLaunch, code: ExitCode, why_failed: Callable[[], str], announce: Callable[[str], None]
) -> EndedAttempt:
    """The job attempt that ended, with the progress that earlier starts of the Slurm job, or of its array, have
    kept."""
    own = own_checkpoints(launch)
    kept = with_retries(lambda: read_json(launch.run_dir.path / "idle_lives.json")) or {}
    if kept.get("job") != own.job:  # somebody has started the job anew, perhaps from an older step
        kept = {}
    before = JobProgress(int(kept.get("lives", 0)), int(kept.get("best_step", 0)))
    groups = launch.allocation.ranks // launch.group_size
    return ended_attempt(
        launch.run_dir, code, why_failed, launch.flags, own=own, groups=groups, before=before, reported=announce
    )


def keep_idle_attempts(launch: SlurmLaunch, ended: EndedAttempt, decision: RestartDecision) -> None:
    """Write the progress of all job attempts, for the next decision, which another start of the Slurm job may make."""
    reported = {
        "job": own_checkpoints(launch).job,
        "lives": decision.progress.idle_attempts,
        "best_step": decision.progress.best_step,
    }
    if decision.progress != ended.before:
        with_retries(lambda: write_json(launch.run_dir.path / "idle_lives.json", reported))


def facts_of(launch: SlurmLaunch, may_start: bool) -> SlurmFacts:
    """The state of the Slurm job; the nodes are asked only if another job attempt may begin (``may_start``)."""
    allocation, reported = launch.allocation, reported_at_last(launch.allocation.job)
    return SlurmFacts(
        state=reported.get("JobState", ""),
        nodes=allocation.num_nodes,
        nodes_answer=may_start and nodes_answer(allocation),
        time_left_s=time_left_s(reported),
        requeue_wanted=launch.requeue,
        requeue_allowed=reported.get("Requeue") != "0",
        queued_by_slurm=slurm_queues_again(reported),
        next_element=allocation.next_element,
    )


def queue_again(launch: SlurmLaunch, announce: Callable[[str], None]) -> None:
    """Put the job back into the queue; tell the user where that fails."""
    failure = requeue(launch.allocation)
    if failure:
        announce(f"the job could not be queued again: {failure}; use sbatch --requeue")


def end_without_batch_script(launch: SlurmLaunch, index: int, code: ExitCode, notice: Callable[[str], None]) -> None:
    """End the Slurm job in place of a batch script whose node is lost; called by each coordinator after a job attempt.

    Where the batch script still runs, it ends the job, and this process with it, so this does not return. Candidate
    ``index`` looks the less often the higher its number is, so that candidate 0 is most often the first to act."""

    def announce(text: str) -> None:
        notice(f"spare-slurm: {text}")

    while not batch_script_is_lost(launch.allocation.job):
        time.sleep(AFTER_S * (1 + index))
    announce("the node of the batch script is lost; this coordinator ends the Slurm job")
    ended = last_attempt(launch, code, lambda: f"see {launch.run_dir.logs}", announce)
    facts = replace(facts_of(launch, may_start=False), batch_script=False)
    decision = after_attempt(replace(ended, obstacles=slurm_obstacles(facts)))
    keep_idle_attempts(launch, ended, decision)
    if decision.sentence:
        announce(decision.sentence)
    if decision.then is Then.QUEUE_AGAIN:
        queue_again(launch, announce)
        return
    with contextlib.suppress(OSError):
        note_end(launch.run_dir, decision.code or code)
    end_array(launch.allocation)
    ask("scancel", launch.allocation.job)
