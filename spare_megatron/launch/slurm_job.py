"""Runs a job in a Slurm batch script, and ends the job from a coordinator when the batch script's node is lost.

The batch script runs lives of the job (:mod:`spare_megatron.launch.slurm_life`) in its allocation, passes signals on,
and does what :mod:`spare_megatron.launch.restart_policy` says after each: leave, begin another life in the same
allocation, or go back into the queue.

When the node of the batch script dies, the life goes on, because with ``--no-kill`` Slurm only takes the node out of
the job. Then the batch script cannot end the job after the life, so a coordinator process does.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import replace

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.exits import ExitCode
from spare_megatron.control_plane.channel import security_of
from spare_megatron.launch.group_restarts import GroupRestarts, Incarnations, LaunchMemory
from spare_megatron.launch.lent_nodes import LentNodes, NodeNeeds
from spare_megatron.launch.life_report import ended_life, forget_last_life
from spare_megatron.launch.node_facts import paths_of
from spare_megatron.launch.processes import Processes
from spare_megatron.launch.restart_policy import (
    EndedLife,
    JobProgress,
    RestartDecision,
    SlurmFacts,
    Then,
    after_life,
    needs_checkpoint,
    slurm_obstacles,
)
from spare_megatron.launch.slurm_commands import (
    ask,
    batch_script_is_lost,
    end_array,
    nodes_answer,
    requeue,
    slurm_queues_again,
    step_names,
    time_left_s,
    told_of,
)
from spare_megatron.launch.slurm_lend import LEND_STEP
from spare_megatron.launch.slurm_life import SlurmLaunch, SlurmLife
from spare_megatron.launch.supervisor import SIGNALS_WAIT_S, on_stop_signals
from spare_megatron.runtime.disk import patiently
from spare_megatron.runtime.run_directory import read_json, write_json

AFTER_S = 3.0
"""How often the first coordinator looks, after the end of a life, whether the batch script's node is lost."""


class SlurmJob:
    """One start of the batch script, with all lives of the job in it."""

    def __init__(self, launch: SlurmLaunch, notice: Callable[[str], None]) -> None:
        """``notice`` shows one line to the user."""
        self._launch, self._dir, self._notice = launch, launch.run_dir, notice
        self._dir.create()
        self._stop_reason = ""
        self._life: SlurmLife | None = None

    async def run(self) -> ExitCode:
        """Run the job; returns the exit code of the batch script. Raises ConfigError where any process found a user's
        error."""
        on_stop_signals(self._signal)
        launch = self._launch
        restarts = GroupRestarts(launch.max_group_restarts, launch.group_restart_pause_s)
        memory = LaunchMemory(restarts, Incarnations())
        lends = LEND_STEP in await asyncio.to_thread(step_names, launch.allocation.job)
        if lends:
            raise ConfigError("this Slurm job lends its nodes to another job; train in a Slurm job of its own")
        security = security_of(self._dir, launch.tls_dir, create=True)
        with Processes() as processes:
            async with LentNodes(self._dir, security, launch.listen, _needs(launch), self._say) as lent:
                decision, code = await self._lives(processes, memory, lent)
        return self._leave(decision, code)

    async def _lives(
        self, processes: Processes, memory: LaunchMemory, lent: LentNodes
    ) -> tuple[RestartDecision, ExitCode]:
        while True:
            forget_last_life(self._dir)
            life = self._life = SlurmLife(self._launch, processes, memory, self._say, lent)
            decision = await self._decide(life, await life.run(self._stop_reason))
            if decision.sentence:
                self._say(decision.sentence)
            if decision.code is not None:
                return decision, decision.code

    async def _decide(self, life: SlurmLife, code: ExitCode) -> RestartDecision:
        """Decide what follows ``life``. If that is another life, no process of this one is left on return."""
        ended = last_life(self._launch, code, life.why_failed, self._say)
        if not needs_checkpoint(code) and code is not ExitCode.REQUEUE:
            decision = after_life(ended)  # does not depend on Slurm
            keep_idle_lives(self._launch, ended, decision)
            return decision
        may_start = needs_checkpoint(code) and not self._stop_reason and not ended.stop_requested
        facts = await asyncio.to_thread(facts_of, self._launch, may_start)
        decision = await self._decided(ended, facts)
        if decision.then is Then.START_AGAIN:
            facts = replace(facts, left_over=not await life.end_steps())
            decision = await self._decided(ended, facts)
        keep_idle_lives(self._launch, ended, decision)
        return decision

    async def _decided(self, ended: EndedLife, facts: SlurmFacts) -> RestartDecision:
        await asyncio.sleep(SIGNALS_WAIT_S)
        stop_requested = ended.stop_requested or bool(self._stop_reason)
        return after_life(replace(ended, stop_requested=stop_requested, obstacles=slurm_obstacles(facts)))

    def _leave(self, decision: RestartDecision, code: ExitCode) -> ExitCode:
        """Queue the job again, or end its array, as decided; returns the exit code."""
        self._say(f"the job leaves with exit code {int(code)}")
        if decision.then is Then.QUEUE_AGAIN:
            queue_again(self._launch, self._say)
        elif code is ExitCode.FINISHED:
            end_array(self._launch.allocation)
        return code

    def _say(self, text: str) -> None:
        self._notice(f"spare-slurm: {text}")

    def _signal(self, reason: str) -> None:
        """Ask for a save and an end at the first signal. Slurm may send more, and kills a job that takes too long."""
        if self._stop_reason:
            return
        self._stop_reason = reason
        if self._life is not None:
            self._life.request_stop(reason)


def _needs(launch: SlurmLaunch) -> NodeNeeds:
    """What a lent node must have."""
    paths = [*paths_of(launch.command[1:]), str(launch.run_dir.path)]
    return NodeNeeds(os.getcwd(), paths, min(launch.group_size, launch.allocation.ranks_per_node))


def last_life(
    launch: SlurmLaunch, code: ExitCode, why_failed: Callable[[], str], say: Callable[[str], None]
) -> EndedLife:
    """The life that ended, with the progress that earlier starts of the Slurm job, or of its array, have kept."""
    kept = patiently(lambda: read_json(launch.run_dir.path / "idle_lives.json")) or {}
    if kept.get("job") != _whole_job(launch):  # somebody has started the job anew, perhaps from an older step
        kept = {}
    before = JobProgress(int(kept.get("lives", 0)), int(kept.get("best_step", 0)))
    groups = launch.allocation.ranks // launch.group_size
    return ended_life(launch.run_dir, code, why_failed, launch.checkpoint_dirs, groups, before, say)


def _whole_job(launch: SlurmLaunch) -> str:
    """What stays the same when Slurm starts the job again."""
    return launch.allocation.array or launch.allocation.job


def keep_idle_lives(launch: SlurmLaunch, ended: EndedLife, decision: RestartDecision) -> None:
    """Write the progress of all lives, for the next decision, which another start of the Slurm job may make."""
    told = {
        "job": _whole_job(launch),
        "lives": decision.progress.idle_lives,
        "best_step": decision.progress.best_step,
    }
    if decision.progress != ended.before:
        patiently(lambda: write_json(launch.run_dir.path / "idle_lives.json", told))


def facts_of(launch: SlurmLaunch, may_start: bool) -> SlurmFacts:
    """The state of the Slurm job; the nodes are asked only if another life may begin (``may_start``)."""
    allocation, told = launch.allocation, told_of(launch.allocation.job)
    return SlurmFacts(
        state=told.get("JobState", ""),
        nodes=allocation.num_nodes,
        nodes_answer=may_start and nodes_answer(allocation),
        time_left_s=time_left_s(told),
        requeue_wanted=launch.requeue,
        requeue_allowed=told.get("Requeue") != "0",
        queued_by_slurm=slurm_queues_again(told),
        next_element=allocation.next_element,
    )


def queue_again(launch: SlurmLaunch, say: Callable[[str], None]) -> None:
    """Put the job back into the queue; tell the user where that fails."""
    failure = requeue(launch.allocation)
    if failure:
        say(f"the job could not be queued again: {failure}; use sbatch --requeue")


def end_without_batch_script(launch: SlurmLaunch, index: int, code: ExitCode, notice: Callable[[str], None]) -> None:
    """End the Slurm job in place of a batch script whose node is lost; called by each coordinator after a life.

    Where the batch script still runs, it ends the job, and this process with it, so this does not return. Candidate
    ``index`` looks the less often the higher its number is, so that candidate 0 is most often the first to act."""

    def say(text: str) -> None:
        notice(f"spare-slurm: {text}")

    while not batch_script_is_lost(launch.allocation.job):
        time.sleep(AFTER_S * (1 + index))
    say("the node of the batch script is lost; this coordinator ends the Slurm job")
    ended = last_life(launch, code, lambda: f"see {launch.run_dir.logs}", say)
    facts = replace(facts_of(launch, may_start=False), batch_script=False)
    decision = after_life(replace(ended, obstacles=slurm_obstacles(facts)))
    keep_idle_lives(launch, ended, decision)
    if decision.sentence:
        say(decision.sentence)
    if decision.then is Then.QUEUE_AGAIN:
        queue_again(launch, say)
        return
    end_array(launch.allocation)
    ask("scancel", launch.allocation.job)
