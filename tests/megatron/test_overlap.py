"""Real Megatron jobs that reduce during the backward pass: the bits are those of the run that does not, whoever dies.

Each run saves its last step; the sha256 over all weights and optimizer moments must be that of the failure-free run
without overlap.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from spare_megatron.megatron_adapter.checkpoint.digest import digest
from tests.process.harness import Job, launch

STEPS = 5
FLAGS = (
    *("--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "32", "--max-position-embeddings", "32"),
    *("--micro-batch-size", "1", "--lr", "1e-3", "--clip-grad", "1.0", "--train-iters", str(STEPS), "--mock-data"),
    *("--tokenizer-type", "NullTokenizer", "--vocab-size", "127", "--split", "100,0,0", "--eval-iters", "0"),
    *("--num-workers", "0", "--save-interval", str(STEPS), "--pipeline-model-parallel-size", "2"),
)
DENSE = ("--num-layers", "4", "--global-batch-size", "8", "--spare-piece-microbatches", "1")
CASES = {
    "virtual stages, recompute": (
        *("--num-layers", "8", "--global-batch-size", "12", "--num-layers-per-virtual-pipeline-stage", "2"),
        *("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"),
    ),
    "experts, exact32": (
        *("--num-layers", "4", "--global-batch-size", "12", "--num-experts", "4", "--moe-router-topk", "2"),
        *("--disable-bias-linear", "--moe-router-enable-expert-bias", "--moe-router-score-function", "sigmoid"),
        *("--spare-reduce", "exact32"),
    ),
}


SLOW = "tests/megatron/slow_backward.py"


def train(
    run_dir: Path, groups: int, flags: tuple[str, ...], *inject: str, script: str = "pretrain_gpt.py"
) -> tuple[Job, list[dict], str]:
    """One job to its end: the job, its lines of metrics.jsonl, the digest of what it saved."""
    words = (*FLAGS, *flags, "--save", str(run_dir / "save"), "--spare-redundancy", str(groups))
    job = launch(run_dir, *words, groups=groups, group_size=None, script=script, inject=inject)
    lines = job.finish(timeout_s=240)
    return job, lines, digest(run_dir / "save" / f"iter_{STEPS:07d}", optimizer=True)


def lost(lines: list[dict]) -> list[int]:
    return [group for line in lines if line["recovery"] for group in line["recovery"]["lost_groups"]]


@pytest.mark.timeout(600)
def test_a_death_between_overlapped_buckets_leaves_no_trace(tmp_path: Path) -> None:
    """A bit of group 3's accumulators flips in step 2, which the result shows. Group 1 is late in step 3, so the
    others' buckets wait for its own; it fails inside its last backward pass, which the script makes slow, with one
    bucket summed, as its traceback says. Group 2 dies in step 5, and one group is left."""
    _, plain, expected = train(tmp_path / "plain", 1, DENSE)
    assert {line["buckets_early"] for line in plain} == {0}
    inject = (
        "bitflip:group=3,position=0,step=2,at=accumulate",
        "slow=8.0:group=1,position=1,step=3,at=forward,n=1",
        "exception:group=1,position=1,step=3,at=reduce,n=0",
        "sigkill:group=2,position=0,step=5,at=backward,n=0",
    )
    job, lines, found = train(tmp_path / "killed", 4, (*DENSE, "--overlap-grad-reduce"), *inject, script=SLOW)
    assert found == expected
    assert lost(lines) == [3, 1, 2]
    assert "group 3 corrupt: rank 0: the accumulator of" in (job.run_dir / "launch.out").read_text()
    assert max(line["buckets_early"] for line in lines) > 0, "nothing was ever summed while the backward pass ran"
    log = (job.run_dir / "logs" / "group-1" / "rank-1.log").read_text()
    assert "in pass_ends" in log or "in arrived" in log, log[-3000:]


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", sorted(CASES))
def test_other_schedules_and_sums_too(tmp_path: Path, case: str) -> None:
    _, _, expected = train(tmp_path / "plain", 3, CASES[case])
    inject = ("sigkill:group=1,step=2,at=reduce", "sigkill:group=0,position=1,step=4,at=backward,n=1")
    _, lines, found = train(tmp_path / "killed", 3, (*CASES[case], "--overlap-grad-reduce"), *inject)
    assert found == expected
    assert lost(lines) == [1, 0]
    assert max(line["buckets_early"] for line in lines) > 0, "nothing was ever summed while the backward pass ran"
