"""The shipped batch scripts on a real Slurm of seven virtual nodes: nodes die, signals come, the job goes on.

Most tests train the toy model of the protocol tests: its weights are equal, bit for bit, whatever failed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from spare_megatron.config.injection import VARIABLE
from tests.process.harness import toy_digests
from tests.process.returning import check_voted, failure_free_weights
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import (
    MEGATRON,
    OWN,
    PIECES,
    QUICK,
    ROOT,
    STEPS,
    TOY,
    SlurmJob,
    live,
    node_of,
    submit,
    until_reported,
)

pytestmark = pytest.mark.timeout(300)

ONE_RANK = ("--group-size", "1", *OWN, *TOY)


@pytest.fixture(scope="module")
def failure_free() -> str:
    """Digest of the weights without failures, of 2 groups of one rank: one engine computes all pieces."""
    return failure_free_weights(STEPS, groups=2, pieces=PIECES)[-1]


def digest(run_dir: Path) -> str:
    """The one digest that all ranks left."""
    found = set(toy_digests(run_dir).values())
    assert len(found) == 1, toy_digests(run_dir)
    return found.pop()


GOOD = (("COMPLETED", "0:0"), ("COMPLETING", "0:0"))
"""State and exit code of a job that ended well; its nodes may still have to confirm the end."""


def one_rank_a_node(
    cluster: Cluster, folder: Path, *flags: str, shipped: str = "single.sbatch", nodes: int = 2
) -> SlurmJob:
    """A job of groups of one rank, each on a node, that saves where it leaves; ``flags`` are further ones of a rank."""
    words: Sequence[str] = (*ONE_RANK, "--redundancy", str(nodes), "--save", str(folder / "save"))
    words = (*words, "--quick-once", str(folder / QUICK), *flags)
    return submit(cluster, folder, words, shipped=shipped, nodes=nodes, ranks=1)


def hurry(job: SlurmJob, folder: Path) -> None:
    """Until the last step of a job that need not wait for its test any more."""
    (folder / QUICK).touch()
    job.until("the last step", lambda: any(step == STEPS for _, step in job_attempts(job)), timeout_s=120)


def until_attempt(job: SlurmJob, number: int) -> None:
    """Until it has committed a step."""
    job.until(f"job attempt {number}", lambda: any(job_attempt == number for job_attempt, _ in job_attempts(job)))


def job_attempts(job: SlurmJob) -> list[tuple[int, int]]:
    """(job attempt, step) of every committed step."""
    return [(line["life"], line["step"]) for line in job.metrics]


@pytest.mark.full  # the batch host dies below
def test_nodes_of_ranks_of_the_coordinator_and_of_the_batch_script_die(cluster: Cluster, tmp_path: Path) -> None:
    """One after the other, each with a group of ranks; the coordinator's is the batch script's more often than not."""
    job = submit(cluster, tmp_path, (*ONE_RANK, "--redundancy", "4", "--quick-once", str(tmp_path / QUICK)), ranks=1)
    job.until_step(4)
    before, killed = job.ranks(), set()
    assert sorted(before) == list(range(4))

    def kill(node: str) -> None:
        cluster.kill_node(node)
        killed.add(node)
        left = 4 - len(killed)
        job.until(f"the loss of {node} is masked", lambda: job.metrics[-1]["live_groups"] == left)

    kill("n4")
    fencing, active_coordinator = job.fencing(), job.coordinator_node()
    kill(active_coordinator)
    assert job.coordinator_node() not in killed
    assert job.fencing() > fencing
    if "n1" not in killed:
        kill("n1")
    assert job.ranks().items() <= before.items(), "a rank was started again"
    hurry(job, tmp_path)
    job.until("the summary", job.run_dir.summary.exists)
    job.check_every_step_once(STEPS)
    summary = json.loads(job.run_dir.summary.read_text())
    assert (summary["outcome"], summary["failures_masked"], summary["steps_lost"]) == ("finished", len(killed), 0)
    reported = job.until_ended()
    assert (reported["JobState"], reported["Restarts"]) in [("CANCELLED", "0"), ("COMPLETING", "0")]
    assert "this coordinator ends the Slurm job" in job.run_dir.coordinator_log.read_text()


def test_a_planned_restart_stays_in_the_allocation_and_sigterm_and_preemption_queue_the_job_again(
    cluster: Cluster, tmp_path: Path, failure_free: str
) -> None:
    """One job of four job attempts; its script is queued a second time meanwhile."""
    job = one_rank_a_node(cluster, tmp_path, "--restart-after", "1")
    job.until_step(4)
    os.kill(job.ranks()[1], signal.SIGKILL)
    until_attempt(job, 2)
    assert cluster.show(job.id)["Restarts"] == "0"
    assert "the job starts again from" in job.output.read_text()
    job.until_step(job.metrics[-1]["step"] + 4)

    environ, output = {"PYTHONPATH": str(ROOT)}, tmp_path / "again.out"
    again = cluster.sbatch(tmp_path / "single.sbatch", f"--output={output}", environ=environ, cwd=ROOT)
    job.until("the refusal of the same script", lambda: cluster.show(again)["ExitCode"] == "2:0")
    assert "is in use by another Slurm job, whose coordinator" in output.read_text()
    job.until_step(job.metrics[-1]["step"] + 1)

    cluster.call("scancel", "--signal=TERM", job.id)
    job.until("the job is queued again", lambda: cluster.show(job.id)["Restarts"] == "1")
    assert "leaves with exit code 4" in job.output.read_text()
    until_attempt(job, 3)
    left = max(step for job_attempt, step in job_attempts(job) if job_attempt == 2)
    assert 8 <= left < STEPS
    job.until_step(job.metrics[-1]["step"] + 4)

    script = tmp_path / "urgent.sh"
    script.write_text("#!/bin/bash\ntrue\n")
    urgent = cluster.sbatch(script, f"--nodes={len(cluster.nodes)}", "--exclusive", "--partition=urgent", cwd=tmp_path)
    job.until("the other job has run", lambda: cluster.show(urgent)["JobState"] == "COMPLETED")
    # Before that, what ends is the start before: its nodes confirm it while the job is queued again.
    hurry(job, tmp_path)
    reported = job.until_ended()
    assert (reported["JobState"], reported["ExitCode"]) in GOOD, job.report()
    # Slurm 24.05 and newer queue it again, older ones leave that to spare-slurm; if both did, it would start once more.
    assert reported["Restarts"] == "2", job.report()
    check_restarted(job, failure_free, 4)


def test_the_batch_host_dies_while_a_spare_node_takes_a_group(cluster: Cluster, tmp_path: Path) -> None:
    """With it go a group, the coordinator more often than not, and the command that starts the group on the spare. The
    others train to the end, and a coordinator ends the Slurm job."""
    steps, quick = 600, tmp_path / QUICK
    flags = ("--redundancy", "3", "--steps", str(steps), "--quick-once", str(quick))
    job = submit(cluster, tmp_path, until_reported(*flags, groups=3), shipped="spare_node.sbatch", nodes=4, ranks=1)
    job.until_step(4)
    before, fencing = job.ranks(), job.fencing()
    led = job.coordinator_node() == "n1"
    cluster.kill_node("n3")
    job.until("the move", lambda: "group 2 moves from n3 to the spare node n4" in job.output.read_text(), timeout_s=200)
    cluster.kill_node("n1")
    job.until("the loss is masked", lambda: "0" not in live(job))
    job.until_step(job.metrics[-1]["step"] + 3)
    assert job.ranks()[1] == before[1]
    assert job.coordinator_node() != "n1"
    assert job.fencing() >= fencing + led
    quick.touch()
    job.until("the summary", job.run_dir.summary.exists, timeout_s=120)
    job.check_every_step_once(steps)
    summary = json.loads(job.run_dir.summary.read_text())
    found = (summary["outcome"], summary["lives"], summary["steps_lost"], summary["wipe_outs"])
    assert found == ("finished", 1, 0, 0)
    reported = job.until_ended()
    assert (reported["JobState"], reported["Restarts"]) in [("CANCELLED", "0"), ("COMPLETING", "0")], job.report()
    assert "this coordinator ends the Slurm job" in job.run_dir.coordinator_log.read_text()
    check_voted(job.run_dir.journal, groups=3)


@pytest.mark.full
def test_a_node_that_fails_three_times_is_left_out(cluster: Cluster, tmp_path: Path) -> None:
    words = until_reported("--redundancy", "2", "--spare-group-restart-pause-s", "0", groups=2)
    job = submit(cluster, tmp_path, words, shipped="spare_node.sbatch", nodes=3, ranks=1)
    job.until_step(2)
    for again in (1, 2, 3):
        os.kill(job.ranks()[1], signal.SIGKILL)
        job.until("group 1 is back", lambda again=again: live(job) == {"0": 0, "1": again}, timeout_s=120)  # type: ignore[misc]
    assert node_of(job.ranks()[1]) == "n3"
    cluster.call("scancel", "--batch", "--signal=TERM", job.id)
    assert job.until_ended()["ExitCode"] == "4:0", job.report()
    assert "group 1 moves from n2 to the spare node n3: n2 has failed too often" in job.output.read_text()
    check_voted(job.run_dir.journal, groups=2)


@pytest.mark.full
def test_a_planned_restart_after_a_nodes_death_gets_new_nodes(
    cluster: Cluster, tmp_path: Path, failure_free: str
) -> None:
    job = one_rank_a_node(cluster, tmp_path, "--restart-after", "1")
    job.until_step(4)
    cluster.kill_node("n2")
    job.until("the job is queued again", lambda: cluster.show(job.id)["Restarts"] == "1")
    assert "not all 2 nodes of the allocation answer" in job.output.read_text()
    assert "leaves with exit code 4" in job.output.read_text()
    # Before that, what ends is the first start: its nodes confirm it while the job is queued again.
    hurry(job, tmp_path)
    reported = job.until_ended()
    assert (reported["JobState"], reported["ExitCode"]) in GOOD, job.report()
    check_restarted(job, failure_free)


def check_restarted(job: SlurmJob, failure_free: str, last_attempt: int = 2) -> None:
    """Restarts lost no step, and all groups trained every job attempt but the first."""
    lines = job.metrics
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1)), job.report()
    assert {line["live_groups"] for line in lines if line["life"] > 1} == {2}
    assert sorted({line["life"] for line in lines}) == list(range(1, last_attempt + 1))
    summary = json.loads(job.run_dir.summary.read_text())
    found = (summary["lives"], summary["steps_lost"], summary["wipe_outs"], summary["failures_masked"])
    assert found == (last_attempt, 0, 0, 1)
    assert digest(job.run_dir.path) == failure_free


def test_an_array_goes_on_from_element_to_element(cluster: Cluster, tmp_path: Path, failure_free: str) -> None:
    """Of one group, which has the pieces of two."""
    alone = ("--pieces", str(2 * PIECES), "--piece-s", "0.125")
    job = one_rank_a_node(cluster, tmp_path, *alone, shipped="array.sbatch", nodes=1)
    job.until_step(4)
    # scancel may end with "try again later" after the signal has arrived; the element's exit code tells that it did.
    subprocess.run(["scancel", "--batch", "--signal=USR1", f"{job.id}_1"], env=cluster.environ, check=False, timeout=60)
    until_attempt(job, 2)
    hurry(job, tmp_path)
    job.until("no element is left", lambda: not cluster.jobs())
    assert cluster.show(f"{job.id}_1")["ExitCode"] == "4:0"
    assert cluster.show(f"{job.id}_2")["ExitCode"] == "0:0"
    assert sorted({job_attempt for job_attempt, _ in job_attempts(job)}) == [1, 2], (
        "an element ran that had nothing left to do"
    )
    assert [step for _, step in job_attempts(job)] == list(range(1, STEPS + 1))
    assert digest(job.run_dir.path) == failure_free


def test_pretrain_gpt_outlives_a_node(cluster: Cluster, tmp_path: Path) -> None:
    """Its rank stands still in step 6 until it dies."""
    whole = ("--pipeline-model-parallel-size", "1")
    hang = {VARIABLE: "hang:group=1,step=6,at=forward"}
    job = submit(cluster, tmp_path, (*OWN, *MEGATRON, *whole), nodes=2, ranks=1, environ=hang)
    job.until_step(2, timeout_s=180)
    cluster.kill_node("n2")
    reported = job.until_ended()
    assert reported["ExitCode"] == "0:0", job.report()
    job.check_every_step_once(12)
    assert job.metrics[-1]["live_groups"] == 1
    assert job.run_dir.log_of(1, 0).is_file()
    assert "iteration       12/      12" in job.output.read_text()


def test_a_users_error_ends_the_job_with_one_sentence(cluster: Cluster, tmp_path: Path) -> None:
    job = submit(cluster, tmp_path, (*OWN, "--group-size", "3", "tests/process/toy_train.py"), nodes=2)
    reported = job.until_ended()
    assert reported["ExitCode"] == "2:0"
    assert job.output.read_text().startswith(
        "spare-slurm: the job has 4 ranks (2 nodes), which is no multiple of the 3"
    )
