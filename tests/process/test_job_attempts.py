"""What a job outlives beside deaths: wipe-outs, its coordinator's death, being asked to stop."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from spare_megatron.megatron_adapter.checkpoint.manifest_version import MANIFEST
from tests.process.harness import Job, launch, toy_digests

GROUPS, PIECES = 3, 2
WORDS = ("--steps", "16", "--pieces", str(PIECES), "--piece-s", "0.02", "--redundancy", "2")


@pytest.fixture(scope="module")
def failure_free_job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The run without failures: of one group that computes all pieces, whose sums are the same, and saves every fourth
    step."""
    run_dir = tmp_path_factory.mktemp("failure-free")
    words = ("--pieces", str(GROUPS * PIECES), "--save", str(run_dir / "save"), "--save-interval", "4")
    job = launch(run_dir, *WORDS, *words, groups=1)
    job.finish()
    return job


@pytest.fixture(scope="module")
def failure_free(failure_free_job: Job) -> dict[str, str]:
    """Position -> digest of the weights of the run without failures."""
    return {name.rpartition("-")[2]: digest for name, digest in toy_digests(failure_free_job.run_dir).items()}


def check_weights(run_dir: Path, failure_free: dict[str, str]) -> None:
    digests = toy_digests(run_dir)
    assert digests
    for name, digest in digests.items():
        assert digest == failure_free[name.rpartition("-")[2]], f"{name} differs from the run without failures"


def test_wipe_out_restarts_from_the_checkpoint_by_itself(tmp_path: Path, failure_free: dict[str, str]) -> None:
    inject = ["sigkill:group=0,step=7,at=forward", "sigkill:group=1,step=9,at=backward"]
    save = tmp_path / "save"
    job = launch(
        tmp_path / "run", *WORDS, "--save", str(save), "--save-interval", "4", "--no-async-save", inject=inject
    )
    lines = job.finish()
    assert [line["step"] for line in lines if line["life"] == 1] == list(range(1, 9))
    assert [line["step"] for line in lines if line["life"] == 2] == list(range(9, 17))
    summary = json.loads((job.run_dir / "summary.json").read_text())
    assert (summary["wipe_outs"], summary["lives"], summary["failures_masked"]) == (1, 2, 1)
    check_weights(job.run_dir, failure_free)


@pytest.mark.full
def test_a_group_that_finds_bad_input_after_a_wipe_out_is_lost(tmp_path: Path, failure_free: dict[str, str]) -> None:
    """It trained with this command before: its host has changed, not the command."""
    inject = ["sigkill:group=0,step=7,at=forward", "sigkill:group=1,step=9,at=backward"]
    words = ("--save", str(tmp_path / "save"), "--save-interval", "4", "--no-async-save")
    unfit = ("--unfit-once", str(tmp_path / "save" / "iter_0000008"))
    job = launch(tmp_path / "run", *WORDS, *words, *unfit, inject=inject)
    lines = job.finish()
    assert [(line["step"], line["live_groups"]) for line in lines if line["life"] == 2] == [
        (step, 2) for step in range(9, 17)
    ]
    assert (job.run_dir / "launch.out").read_text().count("group 0 cannot start: device 1 is gone") == 1
    check_weights(job.run_dir, failure_free)


def test_the_newest_damaged_checkpoint_is_passed_over(
    tmp_path: Path, failure_free_job: Job, failure_free: dict[str, str]
) -> None:
    save = tmp_path / "save"
    shutil.copytree(failure_free_job.run_dir / "save", save)
    newest = save / "iter_0000016" / "rank0.pt"
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    assert (newest.parent / MANIFEST).exists()
    job = launch(tmp_path / "run", *WORDS, "--save", str(save), "--load")
    lines = job.finish()
    assert [line["step"] for line in lines] == [13, 14, 15, 16]
    check_weights(job.run_dir, failure_free)


def test_the_coordinator_dies_and_no_rank_notices_and_then_the_group_that_saves_at_its_last_save(
    tmp_path: Path, failure_free: dict[str, str]
) -> None:
    """The other groups are done by then; the next one saves instead."""
    inject = ["coordinator-sigkill:group=1,step=6,at=reduce", "coordinator-sigkill:group=2,step=10,at=vote"]
    save = tmp_path / "save"
    job = launch(tmp_path, *WORDS, "--save", str(save), inject=[*inject, "sigkill:group=0,step=16,at=checkpoint"])
    job.wait_for_step(1)
    ranks = {(r["group"], r["position"]): r["pid"] for r in job.ranks()}
    job.wait_for_step(12)
    assert {(r["group"], r["position"]): r["pid"] for r in job.ranks()} == ranks, "a rank was started again"
    lines = job.finish()
    assert [line["step"] for line in lines] == list(range(1, 17))
    assert {line["live_groups"] for line in lines} == {3}
    assert json.loads((tmp_path / "coordinator.json").read_text())["fencing"] == 3
    assert [path.name for path in save.glob("iter_*")] == ["iter_0000016"]
    assert len(toy_digests(tmp_path)) == 2 * (GROUPS - 1), "group 0 did not die"
    check_weights(tmp_path, failure_free)


def test_an_error_of_every_group_ends_the_job_and_is_shown(tmp_path: Path) -> None:
    """Without a checkpoint at once, however the coordinator has learned of the ends; with one after three job attempts
    that got no further."""
    words = (*WORDS, "--bad-step", "6")
    once = launch(tmp_path / "once", *words, groups=2, group_size=1)
    assert [line["step"] for line in once.finish(code=1)] == [1, 2, 3, 4, 5]
    reported = (once.run_dir / "launch.out").read_text()
    assert "spare-launch: the job failed; every group ended by an error of its own, first group" in reported
    assert reported.rstrip().endswith("ValueError: record 17 of step 6 is no text"), reported
    assert re.search(rf"the end of {once.run_dir}/logs/group-[01]/rank-0.log:", reported)
    save = ("--save", str(tmp_path / "save"), "--save-interval", "4", "--no-async-save")
    job = launch(tmp_path / "again", *words, *save, groups=2, group_size=1)
    lines = job.finish(code=1, timeout_s=180.0)
    assert [(line["life"], line["step"]) for line in lines] == [(1, s) for s in range(1, 6)] + [
        (job_attempt, 5) for job_attempt in (2, 3, 4)
    ]
    reported = (job.run_dir / "launch.out").read_text()
    assert "; 3 job attempts in a row did not get beyond step 5" in reported
    assert reported.rstrip().endswith("ValueError: record 17 of step 6 is no text"), reported


def test_groups_that_are_killed_are_no_error_of_the_user(tmp_path: Path) -> None:
    """One rank of each: the others find that they are gone, with exceptions of their own."""
    job = launch(tmp_path, *WORDS, groups=2)
    job.wait_for_step(3)
    job.kill(job.pid(0, 1), job.pid(1, 1))
    job.finish(code=3)
    assert json.loads((job.run_dir / "ended.json").read_text()) == {"code": 3}
    reported = (tmp_path / "launch.out").read_text()
    assert "there is no good checkpoint" in reported
    assert "error of its own" not in reported
