"""What follows the end of one life of a job: the launcher leaves, starts another life, or has the job queued again.

Pure: :func:`after_life` is the one place where this is decided, for spare-launch and for Slurm.

May assume: the coordinator's exit code is its last word on the life; no rank of the life trains any more;
``checkpoint`` is whole, and is what the ranks of the next life will load.

Promises:

* Nothing starts again, and nothing is queued again after a wipe-out or a planned restart, without a checkpoint.
* After LIVES_WITHOUT_COMMIT lives in a row without a committed step nothing starts again by itself.
* A job that was told to stop never starts again in place.
* A launcher leaves with one of the codes 0 to 4 that users are told of, never with one that is spoken inside a job.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from spare_megatron.config.exits import ExitCode

LIVES_WITHOUT_COMMIT = 3
"""Lives in a row that end without a single commit, after which starting again is no use."""
LEAST_TIME_LEFT_S = 300.0
"""To the time limit of a Slurm job: a life that begins later would hardly train before it is told to stop."""


class Then(Enum):
    """What the launcher does next."""

    LEAVE = "leave"
    START_AGAIN = "start again"
    """Another life in the same place: on the same machine, in the same allocation."""
    QUEUE_AGAIN = "queue again"
    """Leave, and have Slurm start the job again later, on nodes that may be others."""


@dataclass(frozen=True)
class Obstacles:
    """What the place where the job runs does not allow: clauses for the user, empty where it is allowed."""

    here: str = ""
    """Why another life cannot begin in the same place."""
    queue: str = ""
    """Why the launcher does not queue the job again; it says who goes on instead."""


@dataclass(frozen=True)
class EndedLife:
    """One life, as it ended."""

    code: ExitCode
    """Of its coordinator."""
    reason: str
    """Why it ended, for the user; empty where nobody could say."""
    committed: bool
    """It committed a step."""
    idle_lives: int
    """Lives in a row before this one that committed nothing."""
    checkpoint: str | None
    """The last good one; looked for only where :func:`needs_checkpoint` says so."""
    looked_in: tuple[str, ...]
    """The directories where it was looked for."""
    stop_requested: bool
    """Somebody wants the job to leave: a signal to the launcher, to the coordinator or to a rank."""
    obstacles: Obstacles


@dataclass(frozen=True)
class RestartDecision:
    """What the launcher does, and what it says."""

    then: Then
    code: ExitCode | None
    """With which the launcher leaves; None where it starts another life."""
    idle_lives: int
    """Lives in a row, this one among them, that committed nothing."""
    sentence: str
    """For the user, without the launcher's name; empty where there is nothing to say."""


def needs_checkpoint(code: ExitCode) -> bool:
    """True after a wipe-out and for a planned restart: another life is due, if there is a checkpoint for it."""
    return code in (ExitCode.WIPE_OUT, ExitCode.RESTART)


def is_failure(code: ExitCode) -> bool:
    """True where the coordinator left with no word on how the job goes on, or with one that only its own launcher
    understands and could not follow: the user is told why."""
    return not needs_checkpoint(code) and code not in (ExitCode.FINISHED, ExitCode.REQUEUE, ExitCode.BAD_INPUT)


def after_life(ended: EndedLife) -> RestartDecision:
    """The decision after one life, with the sentence for the user."""
    idle = _idle_lives(ended)
    if ended.code is ExitCode.FINISHED:
        return RestartDecision(Then.LEAVE, ExitCode.FINISHED, idle, "")
    if ended.code is ExitCode.REQUEUE:
        return _left_to_others(ended, idle, ended.reason or "the job was told to stop")
    if ended.code is ExitCode.BAD_INPUT:
        return RestartDecision(Then.LEAVE, ExitCode.BAD_INPUT, idle, ended.reason)
    if is_failure(ended.code):
        return RestartDecision(Then.LEAVE, ExitCode.FAILED, idle, f"the job failed; {ended.reason}")
    why = ended.reason or "every group is lost"
    if ended.checkpoint is None:
        where = " or ".join(ended.looked_in) or "(no --save or --load was given)"
        sentence = f"{why}; there is no good checkpoint in {where} to start again from"
        return RestartDecision(Then.LEAVE, ExitCode.NO_CHECKPOINT, idle, sentence)
    if idle >= LIVES_WITHOUT_COMMIT:
        sentence = f"{why}; {idle} lives of the job ended without a committed step"
        return RestartDecision(Then.LEAVE, ExitCode.FAILED, idle, sentence)
    not_here = "the job was told to stop" if ended.stop_requested else ended.obstacles.here
    if not_here:
        return _left_to_others(ended, idle, f"{why}; {not_here}: its checkpoint is {ended.checkpoint}")
    return RestartDecision(Then.START_AGAIN, None, idle, f"{why}; the job starts again from {ended.checkpoint}")


def _idle_lives(ended: EndedLife) -> int:
    """A life that was told to stop before its first commit neither counts nor begins the count anew."""
    if ended.committed or ended.code is ExitCode.FINISHED:
        return 0
    return ended.idle_lives + needs_checkpoint(ended.code)


def _left_to_others(ended: EndedLife, idle: int, why: str) -> RestartDecision:
    """Leave with 4: Slurm starts the job again, or whoever else queued it."""
    then = Then.LEAVE if ended.obstacles.queue else Then.QUEUE_AGAIN
    who = ended.obstacles.queue or "the job is queued again"
    return RestartDecision(then, ExitCode.REQUEUE, idle, f"{why}; {who}")


# --------------------------------------------------------------------------------------------------------------- Slurm


@dataclass(frozen=True)
class SlurmFacts:
    """What is known of a Slurm job after a life."""

    state: str
    """Slurm's word for the job; empty where Slurm did not answer."""
    nodes: int
    """Of the allocation as it was given."""
    nodes_answer: bool
    """A step could be started on every one of them just now."""
    time_left_s: float | None
    """To the time limit; None: there is none, or it is not known."""
    requeue_wanted: bool
    """``--no-requeue`` was not given to spare-slurm."""
    requeue_allowed: bool
    """Slurm would queue the job again: the site and sbatch's ``--requeue`` say so."""
    next_element: bool
    """The job is an element of an array, and another one comes after it."""
    batch_script: bool = True
    """The node of the batch script is still in the job."""
    left_over: bool = False
    """Processes of the ended life are still there though they were killed."""


def slurm_obstacles(facts: SlurmFacts) -> Obstacles:
    """What the allocation, its time limit and the queue allow."""
    state = facts.state or "unknown"
    here = ""
    if state != "RUNNING":
        here = f"Slurm has the job in state {state}"
    elif not facts.batch_script:
        here = "the node of the batch script is lost"
    elif not facts.nodes_answer:
        here = f"not all {facts.nodes} nodes of the allocation answer"
    elif facts.time_left_s is not None and facts.time_left_s < LEAST_TIME_LEFT_S:
        here = f"the time limit is only {max(0.0, facts.time_left_s):.0f} s away"
    elif facts.left_over:
        here = "processes of the life that ended are still there"
    queue = ""
    if facts.next_element:
        queue = "the next element of the job array goes on"
    elif not facts.requeue_wanted:
        queue = "--no-requeue was given, so somebody else queues the job again"
    elif state != "RUNNING":
        queue = f"Slurm has the job in state {state}, so it is not queued again from here"
    elif not facts.requeue_allowed:
        queue = "Slurm was told not to queue the job again; give its script to sbatch once more"
    return Obstacles(here, queue)
