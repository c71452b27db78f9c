"""What a job asks of Slurm, and how its answers are read.

May assume: Slurm's commands are in the PATH, and may fail or hang for a while. Promises: nothing here waits longer
than its time-out, and an answer that does not come reads as "not known", never as good news.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping

from spare_megatron.config.allocation import Allocation

ANSWER_S = 30.0
"""For one command of Slurm."""
NODES_ANSWER_S = 20.0
"""For every node of the allocation to run a trivial task; a node that is slower counts as lost."""
SRUN = ("srun", "--kill-on-bad-exit=0", "--wait=0", "--export=ALL")


def ask(*words: str, timeout_s: float = ANSWER_S) -> subprocess.CompletedProcess[str]:
    """One command; a time-out is a failure without output."""
    try:
        return subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(words, 124, "", f"no answer within {timeout_s:g} s")


def told_of(job: str) -> Mapping[str, str]:
    """What ``scontrol show job`` says, by field; empty where Slurm does not answer."""
    shown = ask("scontrol", "--oneliner", "show", "job", job).stdout
    return dict(word.split("=", 1) for word in shown.split() if "=" in word)


def time_left_s(told: Mapping[str, str]) -> float | None:
    """Seconds to the time limit; None where there is none, or it is not known."""
    limit_s, run_s = seconds(told.get("TimeLimit", "")), seconds(told.get("RunTime", ""))
    return None if limit_s is None or run_s is None else limit_s - run_s


def seconds(text: str) -> float | None:
    """Of ``[DAYS-]HOURS:MINUTES:SECONDS``; None for a word, as UNLIMITED."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", text)
    if found is None:
        return None
    days, hours, minutes, rest = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + rest)


def nodes_answer(allocation: Allocation) -> bool:
    """True when every node of the allocation, as it was given, runs a task now.

    Slurm itself may take minutes to see that a node is dead, so nobody is asked but the nodes.
    """
    count = allocation.num_nodes
    step = (f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", "--overlap")
    done = ask(*SRUN, *step, "printenv", "SLURMD_NODENAME", timeout_s=NODES_ANSWER_S)
    return done.returncode == 0 and len(set(done.stdout.split())) == count


def batch_script_is_lost(job: str) -> bool:
    """True when Slurm has taken the batch script's node out of a job that runs."""
    told = told_of(job)
    nodes = ask("scontrol", "show", "hostnames", told.get("NodeList", "")).stdout.split()
    return told.get("JobState") == "RUNNING" and bool(nodes) and told.get("BatchHost") not in nodes


def kill_steps(job: str, name: str) -> bool:
    """SIGKILL to every process of the job's steps of this name, stopped ones too, and to no others: a batch script may
    have steps of its own beside ours. True when Slurm lists none any more."""
    listed = ask("squeue", "--noheader", "--steps", f"--jobs={job}", "--format=%i %j")
    steps = [line.split()[0] for line in listed.stdout.splitlines() if line.split()[1:] == [name]]
    if steps:
        ask("scancel", "--signal=KILL", *steps)
    return listed.returncode == 0 and not steps


def requeue(allocation: Allocation) -> str:
    """Put the job back into the queue, which ends this start of it; why that failed, empty where it did not."""
    done = ask("scontrol", "requeue", allocation.job)
    return done.stderr.strip() if done.returncode else ""


def end_array(allocation: Allocation) -> None:
    """The job is finished: the elements of the array that still wait have nothing to do."""
    if allocation.next_element:
        ask("scancel", "--state=PENDING", str(allocation.array))
