"""A job decides about itself: its save interval from what it measures, a restart with all groups that loses no step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spare_megatron.checkpoint.folder import damage, iterations
from spare_megatron.config.exits import PLANNED
from spare_megatron.coordinator.journal import read
from spare_megatron.protocol.messages import StopRequested, Tuned
from spare_megatron.worker.saved_choice import FILE
from tests.process.followed import follow
from tests.process.harness import launch, toy_digests
from tests.process.returning import failure_free_weights
from tests.pure.decided_again import decided_again

pytestmark = pytest.mark.timeout(300)
STEPS, PIECES = 24, 2
WORDS = ("--steps", str(STEPS), "--pieces", str(PIECES), "--piece-s", "0.02")


def digests(run_dir: Path) -> dict[str, str]:
    """Position -> digest of the weights, the same in every group."""
    found = {(name.rpartition("-")[2], digest) for name, digest in toy_digests(run_dir).items()}
    assert len(found) == len(dict(found)) == 1, found
    return dict(found)


@pytest.fixture(scope="module")
def failure_free() -> dict[str, str]:
    """Weights of the run without failures: one engine computes all pieces."""
    return {"0": failure_free_weights(STEPS, groups=4, pieces=PIECES)[-1]}


def test_a_planned_restart_loses_no_step_and_ends_with_the_same_weights(
    tmp_path: Path, failure_free: dict[str, str]
) -> None:
    inject = ["sigkill:group=1,step=5,at=forward", "sigkill:group=3,step=9,at=reduce"]
    words = (*WORDS, "--redundancy", "3", "--save", str(tmp_path / "save"), "--restart-after", "2")
    job = launch(tmp_path / "run", *words, groups=4, group_size=1, inject=inject)
    lines = job.finish(timeout_s=200)
    assert [line["step"] for line in lines] == list(range(1, 25)), "a step is missing or was trained twice"
    assert [line["live_groups"] for line in lines if line["life"] == 2] == [4] * sum(x["life"] == 2 for x in lines)
    first = [line["step"] for line in lines if line["life"] == 1]
    assert 9 <= len(first) <= 10
    summary = json.loads((job.run_dir / "summary.json").read_text())
    assert (summary["lives"], summary["steps_lost"], summary["wipe_outs"], summary["failures_masked"]) == (2, 0, 0, 2)
    asked = [r.event for r in read(job.run_dir / "journal.jsonl") if isinstance(r.event, StopRequested)]
    assert [event.reason.split(",")[0] for event in asked] == [f"{PLANNED}: 2 of 4 groups are lost"]
    followed = follow(job.run_dir / "journal.jsonl")
    assert (followed.commits, followed.losses) == (24, 2)
    assert followed.actions > 0
    assert digests(job.run_dir) == failure_free


def test_an_auto_interval_is_measured_journalled_and_kept_in_checkpoints(
    tmp_path: Path, failure_free: dict[str, str]
) -> None:
    save = tmp_path / "save"
    words = (*WORDS, "--save", str(save), "--save-interval", "auto", "--mtbf-gpu-hours", "0.01", "--redundancy", "auto")
    inject = ["coordinator-sigkill:group=0,step=14,at=vote", "sigkill:group=2,step=16,at=backward"]
    job = launch(tmp_path / "run", *words, groups=4, group_size=1, inject=inject)
    lines = job.finish(timeout_s=200)
    assert [line["step"] for line in lines] == list(range(1, 25))
    tuned = [r.event for r in read(job.run_dir / "journal.jsonl") if isinstance(r.event, Tuned)]
    trial, start, *updates = tuned
    assert trial.save_now
    assert not trial.choice
    assert decided_again(start, None) == start.choice
    assert start.figures["save_s"] > 0  # type: ignore[operator]
    for update in updates:
        assert decided_again(update, start) == update.choice
    output = (job.run_dir / "launch.out").read_text()
    assert "save interval" in output
    assert start.reason in output
    saved = iterations(save)
    assert len(saved) >= 2
    for step in saved[:-1]:
        directory = save / f"iter_{step:07d}"
        assert not damage(directory)
        kept = json.loads((directory / FILE).read_text())
        assert kept["choice"]["save_interval_steps"] in {event.save_interval for event in tuned}
    assert digests(job.run_dir) == failure_free


def test_auto_redundancy_is_chosen_beside_a_given_interval(tmp_path: Path, failure_free: dict[str, str]) -> None:
    save = tmp_path / "save"
    words = (*WORDS, "--save", str(save), "--save-interval", "7", "--mtbf-gpu-hours", "0.01", "--redundancy", "auto")
    job = launch(tmp_path / "run", *words, groups=4, group_size=1)
    job.finish(timeout_s=200)
    (choice,) = [r.event for r in read(job.run_dir / "journal.jsonl") if isinstance(r.event, Tuned)]
    assert decided_again(choice, None) == choice.choice
    assert choice.choice["save_interval_steps"] == 7
    assert sorted(iterations(save)) == [7, 14, 21, 24]
    output = (job.run_dir / "launch.out").read_text()
    assert choice.reason in output
    assert "redundancy" in output
    assert json.loads((job.run_dir / "choice-life-1.json").read_text())["choice"] == choice.choice
    assert digests(job.run_dir) == failure_free
