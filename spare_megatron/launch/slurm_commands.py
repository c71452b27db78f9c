"""Runs Slurm's commands for a job and reads their answers.

May assume: Slurm's commands are in the PATH, and may fail or hang for a while. Promises: nothing here waits longer
than its time-out, and an answer that does not come counts as "not known", never as a good one.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence

from spare_megatron.config.allocation import Allocation

QUEUES_PREEMPTED = (24, 5)
"""The first version of Slurm that queues a job again by itself when its batch script ends while it is preempted."""
ANSWER_S = 30.0
"""Time-out of one command of Slurm."""
AWAY_S = 60.0
"""How long slurmctld may be away while a job is to be queued again. The signal comes 120 s before the time limit."""
AWAY_LOOK_S = 1.0
NODES_ANSWER_S = 20.0
"""Time-out for every node of the allocation to run a trivial task; a node that is slower counts as lost."""
SRUN = ("srun", "--kill-on-bad-exit=0", "--wait=0", "--export=ALL")


def ask(*words: str, timeout_s: float = ANSWER_S) -> subprocess.CompletedProcess[str]:
    """Run one command; a time-out, or a command that is not there, counts as a failure without output."""
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
    except FileNotFoundError:
        return subprocess.CompletedProcess(words, 127, "", f"{words[0]} is not there")


def reported_of(job: str) -> Mapping[str, str]:
    """The fields of ``scontrol show job``; empty where Slurm does not answer."""
    shown = ask("scontrol", "--oneliner", "show", "job", job).stdout
    return dict(word.split("=", 1) for word in shown.split() if "=" in word)


def reported_at_last(job: str) -> Mapping[str, str]:
    """:func:`reported_of`, asked again for :data:`AWAY_S` where Slurm does not answer: slurmctld may be restarted just
    when a job is to be queued again, which nobody does later on."""
    deadline_s = time.monotonic() + AWAY_S
    while not (reported := reported_of(job)) and time.monotonic() < deadline_s:
        time.sleep(AWAY_LOOK_S)
    return reported


def slurm_queues_again(reported: Mapping[str, str]) -> bool:
    """Whether Slurm puts the job back into the queue by itself when its batch script ends, because it is preempting it.
    ``reported`` is what Slurm says of the job; an answer that does not come counts as no."""
    if not _is_preempted(reported):
        return False
    shown = ask("scontrol", "show", "config").stdout
    fields = (line.split("=", 1) for line in shown.splitlines() if "=" in line)
    config = {name.strip(): value.strip() for name, value in fields}
    partition = ask("scontrol", "--oneliner", "show", "partition", reported.get("Partition", "")).stdout
    mode = re.search(r"\bPreemptMode=(\S+)", partition)
    return queues_preempted(reported, config, mode.group(1) if mode else "")


def queues_preempted(reported: Mapping[str, str], config: Mapping[str, str], partition_mode: str) -> bool:
    """:func:`slurm_queues_again`, from the fields of ``scontrol show job`` and ``show config`` and the PreemptMode of
    the job's partition.

    Each such requeue counts towards MaxBatchRequeue, at which Slurm holds the job; it is no use where it would be held.
    The mode of a quality of service is not known here, so with preempt/qos the answer is no."""
    version = re.match(r"(\d+)\.(\d+)", config.get("SLURM_VERSION", ""))
    counted, limit = reported.get("BatchFlag", ""), config.get("MaxBatchRequeue", "")
    return (
        _is_preempted(reported)
        and version is not None
        and tuple(map(int, version.groups())) >= QUEUES_PREEMPTED
        and config.get("PreemptType") == "preempt/partition_prio"
        and "REQUEUE" in partition_mode.split(",")
        and counted.isdigit()
        and limit.isdigit()
        and int(counted) < int(limit)
    )


def _is_preempted(reported: Mapping[str, str]) -> bool:
    """Whether Slurm has reported the job to leave for another one, and may queue it again."""
    return reported.get("PreemptTime", "None") != "None" and reported.get("Requeue") == "1"


def time_left_s(reported: Mapping[str, str]) -> float | None:
    """Seconds to the time limit; None where there is none, or it is not known."""
    limit_s, run_s = seconds(reported.get("TimeLimit", "")), seconds(reported.get("RunTime", ""))
    return None if limit_s is None or run_s is None else limit_s - run_s


def seconds(text: str) -> float | None:
    """The seconds of ``[DAYS-]HOURS:MINUTES:SECONDS``; None for any other text, as UNLIMITED."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", text)
    if found is None:
        return None
    days, hours, minutes, rest = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + rest)


def nodes_answer(allocation: Allocation) -> bool:
    """Whether every node that the allocation had at the start of the job runs a task now.

    Slurm may take minutes to notice that a node is dead, so the nodes themselves are asked.
    """
    count = allocation.num_nodes
    step = (f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", "--overlap")
    done = ask(*SRUN, *step, "printenv", "SLURMD_NODENAME", timeout_s=NODES_ANSWER_S)
    return done.returncode == 0 and len(set(done.stdout.split())) == count


def node_names(node_list: str) -> list[str]:
    """The names of the nodes that Slurm writes as 'n[1-4]'; empty where it does not answer."""
    return ask("scontrol", "show", "hostnames", node_list).stdout.split()


def racks_of(names: Sequence[str]) -> list[str]:
    """The lowest switch, or the block, that Slurm's topology has above each of the nodes; empty where it has none."""
    shown = ask("scontrol", "show", "topology").stdout
    found = re.finditer(r"^(?:SwitchName=(\S+) Level=0|BlockName=(\S+)) .*?\bNodes=(\S+)", shown, re.MULTILINE)
    rack_of = {name: one[1] or one[2] for one in found for name in expanded(one[3])}
    return [rack_of.get(name, "") for name in names] if rack_of else []


def expanded(node_list: str) -> Iterator[str]:
    """The names in 'n[1-3,07],gpu1', without asking Slurm, as a topology has a list for each of many switches."""
    for one in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", node_list):
        texts = re.split(r"\[([^\]]*)\]", one)
        choices = [[text] if index % 2 == 0 else list(_numbers(text)) for index, text in enumerate(texts)]
        yield from map("".join, itertools.product(*choices))


def _numbers(text: str) -> Iterator[str]:
    """'1', '2', '3', '07' of '1-3,07'."""
    for part in text.split(","):
        first, _, last = part.partition("-")
        for number in range(int(first), int(last or first) + 1):
            yield str(number).zfill(len(first))


def in_service(names: Sequence[str]) -> dict[str, bool]:
    """Whether Slurm says of each node that it answers, and is not taken out of service."""
    found = {}
    for line in ask("scontrol", "--oneliner", "show", "node", ",".join(names)).stdout.splitlines():
        reported = dict(word.split("=", 1) for word in line.split() if "=" in word)
        state = reported.get("State", "DOWN")
        out = {"DOWN", "DRAIN", "FAIL", "NOT_RESPONDING", "POWERED_DOWN"}.intersection(state.split("+"))
        found[reported.get("NodeName", "")] = not out and "*" not in state
    return found


def step_names(job: str) -> list[str]:
    """The names of a job's steps."""
    return ask("squeue", "--noheader", "--steps", f"--jobs={job}", "--format=%j").stdout.split()


def batch_script_is_lost(job: str) -> bool:
    """Whether the job runs, but Slurm has taken the node of its batch script out of it."""
    reported = reported_of(job)
    nodes = node_names(reported.get("NodeList", ""))
    return reported.get("JobState") == "RUNNING" and bool(nodes) and reported.get("BatchHost") not in nodes


def kill_steps(job: str, name: str) -> bool:
    """SIGKILL every process of the job's steps of this name, or one that goes on behind it with '-', stopped ones too,
    but of no others: a batch script may have steps of its own. True when Slurm lists no such step any more."""
    listed = ask("squeue", "--noheader", "--steps", f"--jobs={job}", "--format=%i %j")
    lines = (line.split() for line in listed.stdout.splitlines())
    steps = [line[0] for line in lines if len(line) == 2 and f"{line[1]}-".startswith(f"{name}-")]
    if steps:
        ask("scancel", "--signal=KILL", *steps)
    return listed.returncode == 0 and not steps


def requeue(allocation: Allocation) -> str:
    """Put the job back into the queue, which ends this start of it; again for :data:`AWAY_S` where Slurm does not
    answer. Returns why that failed, empty where it did not."""
    deadline_s = time.monotonic() + AWAY_S
    while True:
        answers = bool(reported_of(allocation.job))
        done = ask("scontrol", "requeue", allocation.job)
        if not done.returncode:
            return ""
        if answers or time.monotonic() > deadline_s:
            return done.stderr.strip()
        time.sleep(AWAY_LOOK_S)


def end_array(allocation: Allocation) -> None:
    """Cancel the elements of a finished job's array that still wait, for they have nothing to do."""
    if allocation.next_element:
        ask("scancel", "--state=PENDING", str(allocation.array))
