"""Every point of a step, and random moments of it, in real Megatron jobs: one rank or a whole group is killed.

What must hold after any kill: every step is committed exactly once, with the loss of the run without failures; no
survivor is started anew; nothing that a survivor computed is thrown away, and what was computed twice is what the dead
had last reported; the weights and the optimizer's moments are those of the run without failures, bit for bit.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from spare_megatron.coordinator import journal
from spare_megatron.megatron_adapter.checkpoint.digest import digest
from spare_megatron.placement.placement import build_placement
from spare_megatron.protocol.messages import Lost, SendCommit
from tests.process.harness import Job, launch

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

STEPS = 16
FLAGS = (
    *("--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "32"),
    *("--max-position-embeddings", "32", "--micro-batch-size", "1", "--lr", "1e-3", "--clip-grad", "1.0"),
    *("--train-iters", str(STEPS), "--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "127"),
    *("--attention-dropout", "0.1", "--hidden-dropout", "0.1", "--log-interval", "1", "--split", "90,5,5"),
    *("--eval-interval", "5", "--eval-iters", "2", "--num-workers", "0", "--save-interval", str(STEPS)),
    *("--pipeline-model-parallel-size", "2"),
)
LAYOUTS: dict[str, tuple[int, int, tuple[str, ...]]] = {
    "PP2x4": (4, 2, ("--global-batch-size", "16")),
    "TP2xPP2x3": (3, 4, ("--tensor-model-parallel-size", "2", "--sequence-parallel", "--global-batch-size", "12")),
}
TOLERANCE = 1e-5
"""Relative, of a step's loss. The weights are compared bit for bit."""


@dataclass(frozen=True)
class FailureFree:
    """A layout, and what its run without failures gave."""

    layout: str
    losses: list[float]
    validation: list[float]
    digest: str


def start(run_dir: Path, layout: str, *inject: str, redundancy: int = 0, flags: Sequence[str] = ()) -> Job:
    """One job; ``redundancy`` 0: every group hosts every shard."""
    groups, _, own = LAYOUTS[layout]
    words = (*FLAGS, *own, *flags, "--save", str(run_dir / "save"), "--spare-redundancy", str(redundancy or groups))
    return launch(run_dir, *words, groups=groups, group_size=None, script="pretrain_gpt.py", inject=inject)


def saved(job: Job) -> str:
    """Digest of the last step's weights and optimizer moments."""
    return digest(job.run_dir / "save" / f"iter_{STEPS:07d}", optimizer=True)


def values(lines: Sequence[dict[str, Any]]) -> list[float]:
    return [line["validation"]["lm loss"] for line in lines if "validation" in line]


@pytest.fixture(scope="module", params=sorted(LAYOUTS))
def failure_free(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FailureFree:
    job = start(tmp_path_factory.mktemp("failure-free"), request.param)
    lines = job.finish(timeout_s=400)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    return FailureFree(request.param, [line["loss"] for line in lines], values(lines), saved(job))


def finish(job: Job, failure_free: FailureFree, victims: Sequence[int], ranks: set[int]) -> list[dict[str, Any]]:
    """Wait for the end and check all that this module promises; ``ranks``: pids of the ranks as they were started."""
    lines = job.finish(timeout_s=400)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1)), "a step was committed twice, or never"
    assert {line["life"] for line in lines} == {1}
    assert job.ranks_seen <= ranks, "a rank was started anew"
    lost = [loss.group for record in records(job, Lost) for loss in record.event.losses]
    assert sorted(lost) == sorted(victims)
    for line, loss in zip(lines, failure_free.losses, strict=True):
        assert line["loss"] == pytest.approx(loss, rel=TOLERANCE), f"step {line['step']}"
    assert values(lines) == pytest.approx(failure_free.validation, rel=TOLERANCE)
    reported = reported_by_the_dead(job.run_dir)
    for line in lines:
        twice = line["pieces_computed"] - line["pieces"]
        assert twice == reported.get(line["step"], 0), f"step {line['step']}: {twice} pieces were computed twice"
    print("reported by the dead:", reported)
    assert saved(job) == failure_free.digest, "the weights or the optimizer's moments differ"
    return lines


def records(job: Job, kind: type) -> list[Any]:
    """The journal's records of one kind of event."""
    return [record for record in journal.read(job.run_dir / "journal.jsonl") if isinstance(record.event, kind)]


def reported_by_the_dead(run_dir: Path) -> dict[int, int]:
    """Step -> pieces of it that groups which died in it had last reported, from the journal alone."""
    reported: dict[int, int] = {}
    step = 1
    for record in journal.read(run_dir / "journal.jsonl"):
        if isinstance(record.event, Lost):
            progress, dead = dict(record.event.progress), {loss.group for loss in record.event.losses}
            reported[step] = reported.get(step, 0) + sum(progress.get(group, 0) for group in dead)
        for action in record.actions:
            if isinstance(action, SendCommit):
                step = action.step + 1
    return {step: pieces for step, pieces in reported.items() if pieces}


def started(job: Job) -> set[int]:
    """Pids of all ranks, once the job trains."""
    job.wait_for_step(1, timeout_s=240)
    return {r["pid"] for r in job.ranks()}


KILLS = {
    "forward, backward": (("forward,n=1", 0), ("backward,n=0", 0)),
    "reduce, vote": (("reduce", 0), ("vote", 0)),
    "apply, checkpoint": (("apply", 0), ("checkpoint", STEPS)),
    "patch of an earlier kill": (("reduce", 0), ("patch", 4)),
    "rebuild after an earlier kill": (("vote", 0), ("rebuild", 4)),
    "two in one step": (("forward", 0), ("vote", 4)),
}
"""Name -> two kills, each at a point of a step; step 0: a step of its own."""


@pytest.mark.parametrize("name", sorted(KILLS))
@pytest.mark.parametrize("who", ["group", "rank"])
def test_a_kill_at_each_point(tmp_path: Path, failure_free: FailureFree, name: str, who: str) -> None:
    positions = ["", ""] if who == "group" else [",position=0", f",position={LAYOUTS[failure_free.layout][1] - 1}"]
    inject = [
        f"sigkill:group={number}{positions[number]},step={step or (4, 8)[number]},at={point}"
        for number, (point, step) in enumerate(KILLS[name])
    ]
    job = start(tmp_path, failure_free.layout, *inject)
    finish(job, failure_free, [0, 1], started(job))


@pytest.mark.parametrize("seed", range(1, 11))
def test_kills_from_outside_at_random_moments(tmp_path: Path, failure_free: FailureFree, seed: int) -> None:
    """Down to one live group: all but one are killed, each at a moment drawn from two steps' time. Ten jobs are 20
    moments of three groups, 30 of four."""
    print(f"seed {seed}")
    draw = random.Random(seed)
    groups, _, _ = LAYOUTS[failure_free.layout]
    job = start(tmp_path, failure_free.layout)
    ranks = started(job)
    victims = draw.sample(range(groups), groups - 1)
    for number, group in enumerate(victims):
        job.wait_for_step(3 + 3 * number, timeout_s=240)
        time.sleep(draw.uniform(0.0, 2 * min(line["step_time_s"] for line in job.metrics[1:])))
        pids = job.pids(group) if draw.random() < 0.5 else [draw.choice(job.pids(group))]
        job.kill(*pids)
    finish(job, failure_free, victims, ranks)


def test_a_wipe_out_goes_back_to_the_checkpoint_by_itself(tmp_path: Path, failure_free: FailureFree) -> None:
    """With two hosts a shard, its two hosts die: the job starts itself again, and ends with the same weights."""
    _, other = build_placement(LAYOUTS[failure_free.layout][0], 2).hosts()[0].tolist()
    inject = ("sigkill:group=0,step=8,at=reduce", f"sigkill:group={other},step=8,at=patch")
    flags = ("--save-interval", "5", "--spare-no-adoption")
    job = start(tmp_path, failure_free.layout, *inject, redundancy=2, flags=flags)
    lines = job.finish(timeout_s=600)
    assert [(line["life"], line["step"]) for line in lines] == [
        *((1, step) for step in range(1, 8)),
        *((2, step) for step in range(6, STEPS + 1)),
    ]
    losses = {line["step"]: line["loss"] for line in lines}
    assert [losses[step] for step in sorted(losses)] == pytest.approx(failure_free.losses, rel=TOLERANCE)
    assert saved(job) == failure_free.digest


def test_both_hosts_of_a_shard_die_and_others_adopt_it(tmp_path: Path, failure_free: FailureFree) -> None:
    """The same losses, and nobody starts again: groups that are left open the data of the shard."""
    _, other = build_placement(LAYOUTS[failure_free.layout][0], 2).hosts()[0].tolist()
    inject = ("sigkill:group=0,step=8,at=reduce", f"sigkill:group={other},step=8,at=patch")
    job = start(tmp_path, failure_free.layout, *inject, redundancy=2)
    finish(job, failure_free, [0, other], started(job))
    assert "shard 0" in (tmp_path / "launch.out").read_text()
