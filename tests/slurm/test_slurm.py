"""The shipped batch scripts on a real Slurm of seven virtual nodes: nodes die, signals come, the job goes on.

Most tests train the toy model of the protocol tests: its weights are equal, bit for bit, whatever failed.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from spare_megatron.config.injection import VARIABLE
from tests.process.harness import launch, toy_digests
from tests.process.returning import check_same, check_voted, failure_free_weights, voted, voted_in
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import OWN, PIECES, QUICK, STEPS, TOY, SlurmJob, lend, live, node_of, submit, until_reported

pytestmark = pytest.mark.timeout(300)

TWO_RANKS = ("--group-size", "2", *OWN, *TOY, "--piece-s", "0.125")
MEGATRON = (
    *("pretrain_gpt.py", "--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4"),
    *("--seq-length", "32", "--max-position-embeddings", "32", "--micro-batch-size", "1", "--global-batch-size", "8"),
    *("--lr", "1e-3", "--train-iters", "12", "--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "127"),
    *("--pipeline-model-parallel-size", "2", "--log-interval", "1", "--num-workers", "0", "--eval-iters", "0"),
)


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


def one_rank_a_node(cluster: Cluster, folder: Path, *flags: str, shipped: str = "single.sbatch") -> SlurmJob:
    """A job of two groups of one rank on two nodes that saves where it leaves; ``flags`` are further ones of a rank."""
    words: Sequence[str] = (*OWN, "--group-size", "1", *TOY, "--redundancy", "2", "--save", str(folder / "save"))
    words = (*words, "--quick-once", str(folder / QUICK), *flags)
    return submit(cluster, folder, words, shipped=shipped, nodes=2, ranks=1)


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


def test_nodes_of_ranks_of_the_coordinator_and_of_the_batch_script_die(cluster: Cluster, tmp_path: Path) -> None:
    """One after the other, each with a group of ranks; the coordinator's is the batch script's more often than not."""
    job = submit(cluster, tmp_path, (*TWO_RANKS, "--redundancy", "4", "--quick-once", str(tmp_path / QUICK)))
    job.until_step(4)
    before, killed = job.ranks(), set()
    assert sorted(before) == list(range(8))

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
    """One job of four job attempts."""
    job = one_rank_a_node(cluster, tmp_path, "--restart-after", "1")
    job.until_step(4)
    os.kill(job.ranks()[1], signal.SIGKILL)
    until_attempt(job, 2)
    assert cluster.show(job.id)["Restarts"] == "0"
    assert "the job starts again from" in job.output.read_text()
    job.until_step(job.metrics[-1]["step"] + 4)

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


def test_a_lost_node_is_replaced_by_a_spare_one_and_then_by_one_of_another_lost_group(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Three groups of two nodes and a spare one. A group whose process dies is started again where it ran. When nothing
    is spare any more, a node of group 1 and one of group 2 die at once: the two that are left are one whole group."""
    words = until_reported("--piece-s", "0.05", groups=3, size=2)
    job = submit(cluster, tmp_path, words, shipped="spare_node.sbatch", nodes=7, ranks=1)
    job.until_step(4)
    before = job.ranks()
    assert sorted(before) == [0, 1, 2, 3, 4, 5]
    os.kill(before[1], signal.SIGKILL)
    job.until("group 0 is back", lambda: live(job) == {"0": 1, "1": 0, "2": 0})
    assert "group 0 is started again, as incarnation 1: restart 1 of at most 3" in job.output.read_text()
    before = job.ranks()
    assert [node_of(before[task]) for task in (0, 1)] == ["n1", "n2"]
    cluster.kill_node("n6")
    job.until("group 2 is back", lambda: live(job) == {"0": 1, "1": 0, "2": 1}, timeout_s=200)
    assert [node_of(job.ranks()[task]) for task in (4, 5)] == ["n5", "n7"]
    job.until_step(job.metrics[-1]["step"] + 3)
    cluster.kill_node("n4")
    cluster.kill_node("n7")
    job.until("group 1 is back", lambda: live(job) == {"0": 1, "1": 1}, timeout_s=200)
    assert [node_of(job.ranks()[task]) for task in (2, 3)] == ["n3", "n5"]
    job.until_step(job.metrics[-1]["step"] + 3)
    assert {task: pid for task, pid in job.ranks().items() if task < 2} == {0: before[0], 1: before[1]}
    cluster.call("scancel", "--batch", "--signal=TERM", job.id)
    assert job.until_ended()["ExitCode"] == "4:0", job.report()
    output = job.output.read_text()
    assert "1 spare node (n7): it can take the place of a lost node" in output
    assert "group 2 moves from n6 to the spare node n7" in output
    # from n6 or n7 where it has tried those, before Slurm took them for dead
    assert re.search(r"group 1 moves from n[467] to n5 of group 2, which waits for nodes too", output)
    check_voted(job.run_dir.journal, groups=3, size=2)


def test_a_node_comes_back_and_then_a_lent_one_takes_its_place(cluster: Cluster, tmp_path: Path) -> None:
    """A group of two nodes waits for one that does not answer for a while; then it loses it for good, and a lent one
    completes the group, which is drained before that leaves. Nothing is lent to a job that is over."""
    words = until_reported("--piece-s", "0.05", groups=2, size=2)
    job = submit(cluster, tmp_path, words, nodes=4, ranks=1)
    job.until_step(4)
    cluster.pause_node("n4", True)
    os.kill(job.ranks()[3], signal.SIGKILL)
    job.until("a look", lambda: "group 1 is not started again yet, n4" in job.output.read_text())
    cluster.pause_node("n4", False)
    job.until("group 1 is back", lambda: live(job) == {"0": 0, "1": 1}, timeout_s=120)
    job.until_step(job.metrics[-1]["step"] + 3)

    cluster.kill_node("n4")
    job.until("the loss is masked", lambda: live(job) == {"0": 0})
    lending = lend(job, tmp_path / "lend", 2, 1, "--nodelist=n5,n6")
    job.until("group 1 is back", lambda: live(job) == {"0": 0, "1": 2}, timeout_s=200)
    ranks = job.ranks()
    lent = node_of(ranks[3])
    assert (node_of(ranks[2]), lent) in [("n3", "n5"), ("n3", "n6")]
    job.until_step(job.metrics[-1]["step"] + 3)
    cluster.call("scancel", "--batch", "--signal=USR1", lending.id)
    assert lending.until_ended()["ExitCode"] == "0:0", lending.output.read_text() + job.report()
    job.until("group 1 has left", lambda: live(job) == {"0": 0})
    job.until_step(job.metrics[-1]["step"] + 3)
    cluster.call("scancel", "--batch", "--signal=TERM", job.id)
    assert job.until_ended()["ExitCode"] == "4:0", job.report()
    assert job.ranks() == {}
    assert not job.run_dir.launcher.exists()
    output = job.output.read_text()
    assert f"the node {lent} is lent to the job, with room for 1 rank" in output
    assert f"group 1 moves from n4 to the lent node {lent}" in output
    assert f"the lent node {lent} is to leave" in output
    summary = json.loads(job.run_dir.summary.read_text())
    assert (summary["failures_masked"], summary["steps_lost"]) == (2, 0), "who was drained was not lost"
    check_voted(job.run_dir.journal, groups=2, size=2)
    late = lend(job, tmp_path / "late", 1, 1)
    assert late.until_ended()["ExitCode"] == "2:0"
    assert "nothing is lent" in late.output.read_text()


def test_a_group_trains_on_one_of_its_two_nodes_until_another_is_lent(cluster: Cluster, tmp_path: Path) -> None:
    """Groups of two pipeline stages; group 1 has one after its second node has died. The weights are those of a job of
    one group that loses nothing."""
    flags = (
        *MEGATRON,
        "--untie-embeddings-and-output-weights",
        "--spare-piece-microbatches",
        "1",
        "--clip-grad",
        "1.0",
    )
    several = ("--train-iters", "3000", "--spare-redundancy", "2", "--spare-shapes", "auto")
    job = submit(cluster, tmp_path, (*OWN, "--no-requeue", "--num-groups", "2", *flags, *several), nodes=4, ranks=1)
    job.until_step(2, timeout_s=180)
    cluster.kill_node("n4")
    job.until("group 1 trains on n3", lambda: live(job) == {"0": 0, "1": 1}, timeout_s=150)
    assert "group 1 is started with 1 pipeline stage" in job.output.read_text()
    ranks = job.ranks()
    assert sorted(ranks) == [0, 1, 2]
    assert node_of(ranks[2]) == "n3"
    job.until_step(job.metrics[-1]["step"] + 3)
    lending = lend(job, tmp_path / "lend", 1, 1, "--nodelist=n5")
    job.until("group 1 is home", lambda: live(job) == {"0": 0, "1": 2}, timeout_s=150)
    assert [node_of(job.ranks()[rank]) for rank in (2, 3)] == ["n3", "n5"]
    job.until_step(job.metrics[-1]["step"] + 3)
    cluster.call("scancel", "--batch", "--signal=TERM", job.id)
    assert job.until_ended()["ExitCode"] == "4:0", job.report()
    lending.until_ended()
    found = voted_in(job.run_dir.journal)
    end = ("--train-iters", "3000", "--exit-interval", str(max(found)))
    alone = launch(  # by itself: ranks of the tests' own parent have smaller mock data
        tmp_path / "alone", *flags[1:], *end, groups=1, group_size=None, script="pretrain_gpt.py", under=("env",)
    )
    alone.finish(timeout_s=200.0)
    check_same(found, voted(alone))


def test_the_batch_host_dies_while_a_spare_node_takes_a_group(cluster: Cluster, tmp_path: Path) -> None:
    """With it go a group, the coordinator more often than not, and the command that starts the group on the spare."""
    words = until_reported("--redundancy", "3", groups=3)
    job = submit(cluster, tmp_path, words, shipped="spare_node.sbatch", nodes=4, ranks=1)
    job.until_step(4)
    before = job.ranks()
    cluster.kill_node("n3")
    job.until("the move", lambda: "group 2 moves from n3 to the spare node n4" in job.output.read_text(), timeout_s=200)
    cluster.kill_node("n1")
    job.until("the loss is masked", lambda: "0" not in live(job))
    job.until_step(job.metrics[-1]["step"] + 3)
    assert job.ranks()[1] == before[1]
    cluster.call("scancel", "--signal=TERM", job.id)
    job.until("the job left", lambda: job.run_dir.summary.exists())
    assert job.until_ended()["Restarts"] == "0", job.report()
    job.check_every_step_once(job.metrics[-1]["step"])
    summary = json.loads(job.run_dir.summary.read_text())
    assert (summary["lives"], summary["steps_lost"], summary["wipe_outs"]) == (1, 0, 0)
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
    job = one_rank_a_node(cluster, tmp_path, shipped="array.sbatch")
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
    """Its ranks stand still in step 6 until it dies."""
    job = submit(cluster, tmp_path, (*OWN, *MEGATRON), nodes=2, environ={VARIABLE: "hang:group=1,step=6,at=forward"})
    job.until_step(2, timeout_s=180)
    cluster.kill_node("n2")
    reported = job.until_ended()
    assert reported["ExitCode"] == "0:0", job.report()
    job.check_every_step_once(12)
    assert job.metrics[-1]["live_groups"] == 1
    assert job.run_dir.log_of(1, 1).is_file()
    assert "iteration       12/      12" in job.output.read_text()


def test_a_users_error_ends_the_job_with_one_sentence(cluster: Cluster, tmp_path: Path) -> None:
    job = submit(cluster, tmp_path, (*OWN, "--group-size", "3", "tests/process/toy_train.py"), nodes=2)
    reported = job.until_ended()
    assert reported["ExitCode"] == "2:0"
    assert job.output.read_text().startswith(
        "spare-slurm: the job has 4 ranks (2 nodes), which is no multiple of the 3"
    )
