"""Groups that have lost a device come back with fewer pipeline stages, or go home again: the weights of every step are
those of the run without failures, bit for bit, and so is the state from which the job goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spare_megatron.checkpoint.folder import last_good
from spare_megatron.coordinator.journal import Record
from spare_megatron.megatron_adapter.checkpoint.digest import digest
from spare_megatron.protocol.messages import Saved, Vote
from tests.process.harness import Job, launch
from tests.process.returning import RETURNS, check_same, held, is_member, leave_whole, records, reported, voted

FLAGS = (
    *("--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "32"),
    *("--max-position-embeddings", "32", "--micro-batch-size", "1", "--lr", "1e-3", "--clip-grad", "1.0"),
    *("--train-iters", "2000", "--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "127"),
    *("--attention-dropout", "0.1", "--hidden-dropout", "0.1", "--log-interval", "1", "--split", "90,5,5"),
    *("--eval-interval", "5", "--eval-iters", "1", "--num-workers", "0", "--global-batch-size", "6"),
    *("--spare-reduce", "exact", "--spare-piece-microbatches", "1"),
    *("--save-interval", "1000"),
)
PP2, PP3, PP4 = (("--pipeline-model-parallel-size", stages) for stages in "234")
D2 = ("--spare-inner-data-parallel", "2", "--global-batch-size", "12")
ENDS = ("--decoder-first-pipeline-num-layers", "1", "--decoder-last-pipeline-num-layers", "1")
LARGE = ("--decoder-last-pipeline-num-layers", "6")
"""Of nine layers, so a stage of three is a part of one stage of home."""
BACK = ("--spare-redundancy", "2", *RETURNS)
UNTIED = "--untie-embeddings-and-output-weights"
EXPERTS = (
    *("--num-experts", "4", "--moe-router-topk", "2", "--moe-router-score-function", "sigmoid"),
    *("--moe-router-enable-expert-bias", "--moe-router-load-balancing-type", "aux_loss"),
    *("--moe-aux-loss-coeff", "1e-2"),
)
CUT = ("--spare-max-group-restarts", "3", "--spare-shapes")
"""With a number of stages that cuts those of home. The digests of votes are of rows, so a job with which another one is
compared step by step has these flags too."""
LAYOUTS = {
    "PP2": (PP2, "1"),
    "PP3 cut": ((*PP3, "--num-layers", "6", *CUT, "2"), "2"),
    "PP4 cut": ((*PP4, "--num-layers", "8", "--bf16", "--spare-reduce", "exact32", *CUT, "3,1"), "3"),
    "PP4 cut in one": ((*PP4, "--num-layers", "9", *LARGE, *EXPERTS, UNTIED, *CUT, "3"), "3"),
    "untied": ((*PP2, UNTIED), "1"),
    "experts": ((*PP2, *EXPERTS), "1"),
    "chunks": ((*PP2, "--num-virtual-stages-per-pipeline-rank", "2"), "1"),
    "PP4 chunks": ((*PP4, "--num-layers", "8", "--num-virtual-stages-per-pipeline-rank", "2"), "2"),
    "uneven": ((*PP4, "--num-layers", "6", *ENDS), "2"),
    "layout": ((*PP4, "--pipeline-model-parallel-layout", "E|tt|t|tL"), "2"),
    "D2": ((*PP2, *D2), "1"),
    "EP2": ((*PP2, *D2, *EXPERTS, "--expert-model-parallel-size", "2"), "1"),
    "PP4": (PP4, "2"),
    "TP2xPP2": ((*PP2, "--tensor-model-parallel-size", "2", "--sequence-parallel"), "1"),
    "bf16": ((*PP2, "--bf16", "--overlap-grad-reduce"), "1"),
    "exact32": ((*PP2, "--spare-reduce", "exact32"), "1"),
    "pieces": ((*PP2, *D2[2:], "--spare-piece-microbatches", "2", "--spare-audit-rate", "1", *BACK[:2]), "1"),
    "relief": ((*PP2, "--spare-relief", "--spare-schedule", "tickets"), "1"),
}
"""Flags, and the stages of the smaller shape."""


def train(run_dir: Path, groups: int, *flags: str, inject: tuple[str, ...] = ()) -> Job:
    words = (*FLAGS, *flags, "--save", str(run_dir / "save"))
    return launch(
        run_dir,
        *words,
        groups=groups,
        group_size=None,
        script="tests/data/pretrain_remembering.py",
        inject=inject,
        environ={"STEP_S": "1.2"} if inject else {},
    )


@pytest.mark.timeout(900)
def test_a_group_comes_back_with_one_stage_and_goes_home(tmp_path: Path) -> None:
    """It is killed while it learns in its smaller shape, and the coordinator is killed while the group is away; it is
    killed once more when it leaves to go home."""
    fit = tmp_path / "fit"
    # The host is fit for one rank of the group and, once the file is there, for both.
    check = f'[ "$SPARE_GROUP_SIZE" = 1 ] || [ -e {fit} ]'
    inject = ("sigkill:group=2,step=3,at=reduce", "sigkill:group=2,step=0,at=join,n=0,restart=1")
    inject += (held(4, by=0, until=(2, 1)), held(5, by=0, until=(2, 2)))
    flags = (*PP2, "--num-layers", "2")
    job = train(
        tmp_path / "run", 3, *flags, *BACK, "--spare-shapes", "auto", "--spare-health-check", check, inject=inject
    )
    job.wait_for("the second loss", lambda: output(job).count("group 2 (incarnation 1) has failed"), timeout_s=240.0)
    job.kill(json.loads((job.run_dir / "processes.json").read_text())["coordinator"]["pid"])
    job.wait_for("group 2 with one stage", lambda: is_member(job, 2, 2), timeout_s=240.0)
    assert output(job).count("group 2 is started with 1 pipeline stage") == 2
    fit.touch()
    job.wait_for("the way home", lambda: "group 2 leaves with a commit" in output(job), timeout_s=60.0)
    job.kill(*job.pids(2))
    found = leave_whole(job, 3, (2, 3))
    assert "as incarnation 3: it has left for that" in output(job)
    check_failure_free(tmp_path, job, found, *flags)


@pytest.mark.timeout(900)
def test_a_group_whose_stages_cut_those_of_home_gives_its_state_saves_and_goes_home(tmp_path: Path) -> None:
    """Group 0 comes back with two stages of three layers, where home has three of two. Then it is the only donor of
    group 1, and the saver."""
    fit = tmp_path / "fit"
    check = f'[ "$SPARE_GROUP" = 1 ] || [ "$SPARE_GROUP_SIZE" = 2 ] || [ -e {fit} ]'
    inject = ("sigkill:group=0,step=3,at=reduce", held(4, by=1, until=(0, 1)))
    flags = (*LAYOUTS["PP3 cut"][0], "--global-batch-size", "4")
    job = train(
        tmp_path / "run", 2, *flags, *BACK, "--spare-health-check", check, "--save-interval", "5", inject=inject
    )
    job.wait_for("group 0 with two stages", lambda: is_member(job, 0, 1), timeout_s=240.0)
    assert "group 0 is started with 2 pipeline stages" in output(job)
    job.wait_for("its checkpoint", lambda: reported(job, Saved, 0, 1), timeout_s=60.0)
    job.kill(job.pid(1, 0))
    job.wait_for("group 1", lambda: is_member(job, 1, 1), timeout_s=240.0)
    fit.touch()
    job.wait_for("group 0 at home", lambda: is_member(job, 0, 2), timeout_s=240.0)
    found = leave_whole(job, 2, (0, 2), (1, 1))
    check_failure_free(tmp_path, job, found, *flags)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_two_groups_in_a_smaller_shape_carry_the_job(tmp_path: Path) -> None:
    """Group 0 comes back with one stage. Then group 1 is lost too, learns from it and from group 2, and has one stage.
    Then group 0 is lost while it votes, and comes back with state of a group of each shape."""
    check = '[ "$SPARE_GROUP_SIZE" = 1 ]'
    inject = ("sigkill:group=0,step=3,at=reduce", held(4, by=2, until=(0, 1)))
    job = train(tmp_path / "run", 3, *PP2, *BACK, "--spare-shapes", "1", "--spare-health-check", check, inject=inject)
    job.wait_for("group 0 with one stage", lambda: is_member(job, 0, 1), timeout_s=240.0)
    job.kill(job.pid(1, 1))
    job.wait_for("group 1 with one stage", lambda: is_member(job, 1, 1), timeout_s=240.0)
    step = job.metrics[-1]["step"]
    job.wait_for("its vote", lambda: any(is_vote(one, 0, 1, step) for one in records(job)), every_s=0.001)
    job.kill(*job.pids(0))
    found = leave_whole(job, 3, (0, 2))
    check_failure_free(tmp_path, job, found, *PP2)


@pytest.mark.timeout(900)
@pytest.mark.full  # one that cuts the stages of home is above
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_group_in_a_smaller_shape_gives_its_state_and_saves(tmp_path: Path, layout: str) -> None:
    """Group 0 comes back with fewer stages. Then group 1 comes back home, with state of group 0, which also saves."""
    flags, stages = LAYOUTS[layout]
    most = 2 if layout in ("TP2xPP2", "D2", "EP2") else int(stages)
    check = f'[ "$SPARE_GROUP" = 1 ] || [ "$SPARE_GROUP_SIZE" -le {most} ]'
    shapes = (*(() if "--spare-shapes" in flags else ("--spare-shapes", stages)), "--spare-health-check", check)
    inject = ("sigkill:group=0,step=3,at=reduce", held(4, by=2, until=(0, 1)))
    job = train(tmp_path / "run", 3, *flags, *BACK, *shapes, inject=inject)
    job.wait_for("group 0 in a smaller shape", lambda: is_member(job, 0, 1), timeout_s=240.0)
    assert f"group 0 is started with {stages} pipeline stage" in (job.run_dir / "launch.out").read_text()
    job.wait_for_step(job.metrics[-1]["step"] + 3)
    job.kill(job.pid(1, 0))
    found = leave_whole(job, 3, (0, 1), (1, 1))
    groups = 3 if layout == "pieces" else 1  # which microbatches are one piece depends on the number of groups
    failure_free = check_failure_free(tmp_path, job, found, *flags, groups=groups)
    if CUT[-1] in flags:
        uncut = train(tmp_path / "uncut", 1, *flags[: flags.index(CUT[0])], "--exit-interval", str(max(found)))
        uncut.finish(timeout_s=400.0)
        assert saved(uncut) == saved(job), "what a job computes depends on how rows are cut"
    then = str(max(found) + 4)
    after, as_well = (
        follow(tmp_path / name, one, then, *flags, groups=groups)
        for name, one in (("after", job), ("as-well", failure_free))
    )
    assert after == as_well, "the scales of sums differ"


def output(job: Job) -> str:
    """What spare-launch has printed."""
    return (job.run_dir / "launch.out").read_text()


def is_vote(record: Record, group: int, incarnation: int, after: int) -> bool:
    """Whether it is a vote of an incarnation of a group for a later step."""
    vote = record.event
    mine = isinstance(vote, Vote) and (vote.group, vote.incarnation) == (group, incarnation)
    return mine and vote.result.step > after


def check_failure_free(tmp_path: Path, job: Job, found: dict[int, set[str]], *flags: str, groups: int = 1) -> Job:
    """A job that no fault strikes has the same weights in each step, and the same state at the end."""
    failure_free = train(tmp_path / "failure-free", groups, *flags, "--exit-interval", str(max(found)))
    failure_free.finish(timeout_s=400.0)
    check_same(found, voted(failure_free))
    assert saved(job) == saved(failure_free), "weights or optimizer differ"
    return failure_free


def saved(job: Job) -> str:
    """The digest of its last checkpoint."""
    return digest(last_good(job.run_dir / "save")[0], optimizer=True)


def follow(run_dir: Path, before: Job, then: str, *flags: str, groups: int) -> dict[int, set[str]]:
    """The digests of a job that goes on from the checkpoint of another one until a step."""
    job = train(run_dir, groups, *flags, "--load", str(before.run_dir / "save"), "--exit-interval", then)
    job.finish(timeout_s=400.0)
    return voted(job)
