"""Where groups are started on a real Slurm of seven virtual nodes: on a spare node, on a node of another lost group, on
one that comes back, on a lent one, and on fewer nodes than before."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from spare_megatron.cli.drain import main
from spare_megatron.config.injection import VARIABLE
from tests.process.harness import launch
from tests.process.returning import check_same, check_voted, voted, voted_in
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import MEGATRON, OWN, lend, live, node_of, submit, until_reported

pytestmark = pytest.mark.timeout(300)


def test_a_lost_node_is_replaced_by_a_spare_one_and_then_by_one_of_another_lost_group(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Three groups of two nodes and a spare one. When nothing is spare any more, a node of group 1 and one of group 2
    die at once: the two that are left are one whole group."""
    words = until_reported("--piece-s", "0.15", groups=3, size=2)
    job = submit(cluster, tmp_path, words, shipped="spare_node.sbatch", nodes=7, ranks=1)
    job.until_step(4)
    before = job.ranks()
    assert sorted(before) == [0, 1, 2, 3, 4, 5]
    cluster.kill_node("n6")
    job.until("group 2 is back", lambda: live(job) == {"0": 0, "1": 0, "2": 1}, timeout_s=200)
    assert [node_of(job.ranks()[task]) for task in (4, 5)] == ["n5", "n7"]
    job.until_step(job.metrics[-1]["step"] + 3)
    cluster.kill_node("n4")
    cluster.kill_node("n7")
    job.until("group 1 is back", lambda: live(job) == {"0": 0, "1": 1}, timeout_s=200)
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


def test_a_node_comes_back_and_then_a_lent_one_takes_its_place(patient_cluster: Cluster, tmp_path: Path) -> None:
    """A group of two nodes waits for one that does not answer for a while, and is started again where it ran; then it
    loses that node for good, and a lent one completes the group, which is drained before the node leaves. Nothing is
    lent to a job that is over."""
    cluster = patient_cluster
    words = until_reported("--piece-s", "0.15", groups=2, size=2)
    job = submit(cluster, tmp_path, words, nodes=4, ranks=1)
    job.until_step(4)
    cluster.pause_node("n4", True)
    os.kill(job.ranks()[3], signal.SIGKILL)
    job.until("a look", lambda: "group 1 is not started again yet, n4" in job.output.read_text())
    cluster.pause_node("n4", False)
    job.until("group 1 is back", lambda: live(job) == {"0": 0, "1": 1}, timeout_s=120)
    assert "group 1 is started again, as incarnation 1: restart 1 of at most 3" in job.output.read_text()
    assert [node_of(job.ranks()[task]) for task in (2, 3)] == ["n3", "n4"]
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


def test_a_group_with_wrong_results_and_a_drained_one_move_to_the_last_spare_nodes(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Where nothing is spare any more when the second one begins, and its own node passes each check."""
    words = until_reported("--audit-rate", "1", groups=3)
    wrong = {VARIABLE: "bitflip:group=2,position=0,step=4,at=gradient,n=0"}
    job = submit(cluster, tmp_path, words, shipped="spare_node.sbatch", nodes=5, ranks=1, environ=wrong)
    job.until("group 2 is back", lambda: live(job) == {"0": 0, "1": 0, "2": 1}, timeout_s=120)
    assert main([str(job.run_dir.path), "--group", "1"]) == 0
    job.until("group 1 is back", lambda: live(job) == {"0": 0, "1": 1, "2": 1}, timeout_s=120)
    assert [node_of(job.ranks()[task]) for task in (0, 1, 2)] == ["n1", "n5", "n4"]
    job.until_step(job.metrics[-1]["step"] + 3)
    cluster.call("scancel", "--batch", "--signal=TERM", job.id)
    assert job.until_ended()["ExitCode"] == "4:0", job.report()
    output = job.output.read_text()
    assert "group 2 moves from n3 to the spare node n4: its results were wrong on n3: group 2 (rank 0) cor" in output
    assert "group 1 moves from n2 to the spare node n5: n2 is drained" in output
    check_voted(job.run_dir.journal, groups=3)


@pytest.mark.full
def test_a_group_trains_on_one_of_its_two_nodes_until_another_is_lent(cluster: Cluster, tmp_path: Path) -> None:
    """Groups of two pipeline stages; group 1 has one after its second node has died. The weights are those of a job of
    one group that loses nothing."""
    flags = (*MEGATRON, "--spare-piece-microbatches", "1", "--clip-grad", "1.0")
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
