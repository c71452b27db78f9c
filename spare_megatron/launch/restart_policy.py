"""Decides what follows the end of one job attempt: the launcher leaves, starts another job attempt, or queues the job
again.

Pure: :func:`after_attempt` is the one place where this is decided, for spare-launch and for Slurm.

May assume: the coordinator's exit code says how the job attempt ended; no rank of the job attempt trains any more;
``checkpoint`` is not damaged, and the ranks of the next job attempt load it.

Promises:

* Nothing starts again, and nothing is queued again after a wipe-out or a planned restart, without a checkpoint.
* After ATTEMPTS_WITHOUT_PROGRESS job attempts in a row none of which got beyond the best step of all job attempts
  nothing starts again by itself: steps that are done again after a restart from a checkpoint are no progress.
* A job that was asked to stop never starts again in place.
* A launcher leaves with one of the exit codes 0 to 4, never with one that is used only inside a job.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from spare_megatron.config.exits import ExitCode

ATTEMPTS_WITHOUT_PROGRESS = 3
"""After so many job attempts in a row that were wiped out at or below the best step of all job attempts the job is not
started again by itself."""
LEAST_TIME_LEFT_S = 300.0
"""The least time to the time limit of a Slurm job at which another job attempt begins; a later one would hardly train
before it is asked to stop."""


class Then(Enum):
    """What the launcher does next."""

    LEAVE = "leave"
    START_AGAIN = "start again"
    """Another job attempt in the same place: on the same machine, in the same allocation."""
    QUEUE_AGAIN = "queue again"
    """Leave, and have Slurm start the job again later, perhaps on other nodes."""


@dataclass(frozen=True)
class Obstacles:
    """Why the job cannot go on in certain ways: clauses for the user, empty where there is no obstacle."""

    here: str = ""
    """Why another job attempt cannot begin in the same place."""
    queue: str = ""
    """Why the launcher does not queue the job again, or what goes on with the job instead."""


@dataclass(frozen=True)
class JobProgress:
    """How far the job attempts have come."""

    idle_attempts: int = 0
    """Job attempts in a row that had to be followed by another one and did not get beyond ``best_step``."""
    best_step: int = 0
    """The newest step that any job attempt has committed."""


@dataclass(frozen=True)
class EndedAttempt:
    """How one job attempt ended, and what is known for the decision on what follows."""

    code: ExitCode
    """The exit code of its coordinator."""
    reason: str
    """Why it ended, for the user; empty where that is not known."""
    first_step: int
    """The step from which it started."""
    reached: int
    """The last step that it committed; ``first_step`` where it committed none."""
    before: JobProgress
    """Of the job attempts before this one."""
    checkpoint: str | None
    """The last good checkpoint; None where there is none, or :func:`needs_checkpoint` is false."""
    looked_in: tuple[str, ...]
    """The directories in which checkpoints are looked for."""
    stop_requested: bool
    """Whether the job was asked to leave, by a signal to the launcher, to the coordinator or to a rank."""
    obstacles: Obstacles
    own_end: str = ""
    """Where every group ended by an exception of its own: the last lines of the first one. Empty otherwise."""


@dataclass(frozen=True)
class RestartDecision:
    """What the launcher does next, and what it tells the user."""

    then: Then
    code: ExitCode | None
    """The exit code of the launcher; None where it starts another job attempt."""
    progress: JobProgress
    """Of all job attempts up to this one."""
    sentence: str
    """The sentence for the user, without the launcher's name; empty for none. Further lines show an exception."""


def needs_checkpoint(code: ExitCode) -> bool:
    """Whether another job attempt is due if there is a checkpoint for it: after a wipe-out and for a planned
    restart."""
    return code in (ExitCode.WIPE_OUT, ExitCode.RESTART)


def is_failure(code: ExitCode) -> bool:
    """Whether ``code`` says neither that the job is finished nor how it goes on, so that the user sees why it
    failed.

    That includes codes that are used only inside a job, as that of a coordinator whose disk failed too often."""
    return not needs_checkpoint(code) and code not in (ExitCode.FINISHED, ExitCode.REQUEUE, ExitCode.BAD_INPUT)


def after_attempt(ended: EndedAttempt) -> RestartDecision:
    """Decide what follows one job attempt."""
    decision = _after_attempt(ended, _progress(ended))
    shown = f"\n{ended.own_end}" if ended.own_end and decision.sentence else ""
    return replace(decision, sentence=decision.sentence + shown)


def _after_attempt(ended: EndedAttempt, progress: JobProgress) -> RestartDecision:
    if ended.code is ExitCode.FINISHED:
        return RestartDecision(Then.LEAVE, ExitCode.FINISHED, progress, "")
    if ended.code is ExitCode.REQUEUE:
        return _left_to_others(ended, progress, ended.reason or "the job was asked to stop")
    if ended.code is ExitCode.BAD_INPUT:
        return RestartDecision(Then.LEAVE, ExitCode.BAD_INPUT, progress, ended.reason)
    if is_failure(ended.code) or (ended.own_end and ended.checkpoint is None):
        return RestartDecision(Then.LEAVE, ExitCode.FAILED, progress, f"the job failed; {ended.reason}")
    why = ended.reason or "every group is lost"
    if ended.checkpoint is None:
        where = " or ".join(ended.looked_in) or "(no --save or --load was given)"
        sentence = f"{why}; there is no good checkpoint of this job in {where} to start again from"
        return RestartDecision(Then.LEAVE, ExitCode.NO_CHECKPOINT, progress, sentence)
    if progress.idle_attempts >= ATTEMPTS_WITHOUT_PROGRESS:
        sentence = f"{why}; {progress.idle_attempts} job attempts in a row did not get beyond step {progress.best_step}"
        return RestartDecision(Then.LEAVE, ExitCode.FAILED, progress, sentence)
    not_here = "the job was asked to stop" if ended.stop_requested else ended.obstacles.here
    if not_here:
        return _left_to_others(ended, progress, f"{why}; {not_here}: its checkpoint is {ended.checkpoint}")
    return RestartDecision(Then.START_AGAIN, None, progress, f"{why}; the job starts again from {ended.checkpoint}")


def _progress(ended: EndedAttempt) -> JobProgress:
    """How far the job has come with this job attempt. One that was asked to stop before it got further is not counted,
    and does not reset the count."""
    known = ended.before
    further = ended.reached > max(ended.first_step, known.best_step)
    if further or ended.code is ExitCode.FINISHED:
        return JobProgress(0, max(ended.reached, known.best_step))
    return replace(known, idle_attempts=known.idle_attempts + needs_checkpoint(ended.code))


def _left_to_others(ended: EndedAttempt, progress: JobProgress, why: str) -> RestartDecision:
    """Leave with exit code 4, so that the job goes on later: Slurm starts it again, or somebody else does."""
    then = Then.LEAVE if ended.obstacles.queue else Then.QUEUE_AGAIN
    who = ended.obstacles.queue or "the job is queued again"
    return RestartDecision(then, ExitCode.REQUEUE, progress, f"{why}; {who}")


# --------------------------------------------------------------------------------------------------------------- Slurm


@dataclass(frozen=True)
class SlurmFacts:
    """The state of a Slurm job after a job attempt."""

    state: str
    """The job's state as Slurm names it; empty where Slurm did not answer."""
    nodes: int
    """Number of nodes of the allocation at the start of the job."""
    nodes_answer: bool
    """Whether every one of them just ran a task."""
    time_left_s: float | None
    """Time to the time limit; None where there is none, or it is not known."""
    requeue_wanted: bool
    """Whether spare-slurm was started without ``--no-requeue``."""
    requeue_allowed: bool
    """Whether Slurm allows the job to be queued again, by the site's configuration and sbatch's ``--requeue``."""
    next_element: bool
    """Whether the job is an element of a job array and another element comes after it."""
    queued_by_slurm: bool = False
    """Whether Slurm queues the job again by itself when its batch script ends, because it is preempting it."""
    batch_script: bool = True
    """Whether the node of the batch script is still in the job."""
    left_over: bool = False
    """Whether processes of the ended job attempt are still there although they were killed."""


def slurm_obstacles(facts: SlurmFacts) -> Obstacles:
    """The obstacles that the state of a Slurm job puts to another job attempt and to queueing it again."""
    state = facts.state or "unknown"
    here = ""
    if state != "RUNNING":
        here = f"Slurm has the job in state {state}"
    elif not facts.batch_script:
        here = "the node of the batch script is lost"
    elif not facts.nodes_answer:
        all_nodes = f"not all {facts.nodes} nodes of the allocation answer"
        here = all_nodes if facts.nodes > 1 else "the node of the allocation does not answer"
    elif facts.time_left_s is not None and facts.time_left_s < LEAST_TIME_LEFT_S:
        here = f"the time limit is only {max(0.0, facts.time_left_s):.0f} s away"
    elif facts.left_over:
        here = "processes of the job attempt that ended are still there"
    queue = ""
    if facts.next_element:
        queue = "the next element of the job array goes on"
    elif not facts.requeue_wanted:
        queue = "--no-requeue was given, so somebody else queues the job again"
    elif state != "RUNNING":
        queue = f"Slurm has the job in state {state}, so it is not queued again from here"
    elif not facts.requeue_allowed:
        queue = "Slurm was asked not to queue the job again; give its script to sbatch once more"
    elif facts.queued_by_slurm and facts.batch_script:
        # Had it been queued from here, Slurm would still take its next start for preempted, and start it once more.
        queue = "Slurm preempts the job and queues it again by itself"
    return Obstacles(here, queue)
