"""Exact sums on real Megatron jobs: whatever fails, and however many groups there are, the bits are the same.

Each run saves its last step; the sha256 over all weights and optimizer moments must equal that of a failure-free run of
one group.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from spare_megatron.megatron_adapter.checkpoint.digest import digest
from tests.process.harness import Job, launch

STEPS = 4
MODEL = (
    *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "16"),
    *("--max-position-embeddings", "16", "--micro-batch-size", "1", "--lr", "1e-3", "--clip-grad", "1.0"),
    *("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "63"),
    *("--attention-dropout", "0.1", "--hidden-dropout", "0.1", "--eval-iters", "0", "--num-workers", "0"),
    *("--split", "100,0,0", "--spare-heartbeat-timeout-s", "60"),
)
"""Losses are reported by the launcher here; a rank that a busy machine starves for seconds is none."""


def flags_of(steps: int) -> tuple[str, ...]:
    """A job of so many steps, the last of which it saves."""
    return (*MODEL, "--train-iters", str(steps), "--save-interval", str(steps))


FLAGS = flags_of(STEPS)
ALONE = ("--spare-piece-microbatches", "1")
"""Of a job of one group, which would choose larger pieces than several groups do."""
DENSE = ("--pipeline-model-parallel-size", "2", "--global-batch-size", "6")
EXPERTS = (
    *("--num-experts", "4", "--expert-model-parallel-size", "2", "--moe-router-topk", "2", "--disable-bias-linear"),
    *("--moe-aux-loss-coeff", "0.01", "--moe-router-enable-expert-bias", "--moe-router-score-function", "sigmoid"),
    *("--bf16", "--tensor-model-parallel-size", "2", "--sequence-parallel", "--global-batch-size", "8"),
)
INNER = (
    *("--fp16", "--initial-loss-scale", "65536", "--spare-inner-data-parallel", "2", "--recompute-activations"),
    *("--swiglu", "--normalization", "RMSNorm", "--global-batch-size", "12"),
)

EXPERTS_SPLIT = (
    *("--num-experts", "4", "--expert-model-parallel-size", "2", "--moe-router-topk", "2", "--disable-bias-linear"),
    *("--bf16", "--global-batch-size", "8"),
)
SPLIT = "--use-distributed-optimizer"


def train(
    run_dir: Path, groups: int, flags: tuple[str, ...], *inject: str, code: int = 0, steps: int = STEPS
) -> tuple[Job, str]:
    """One job to its end: the job, and the digest of what it saved ('' when it had to stop)."""
    words = (
        *flags_of(steps),
        *(ALONE if groups == 1 else ()),
        *flags,
        "--save",
        str(run_dir / "save"),
        "--spare-redundancy",
        str(groups),
    )
    shape: dict[str, Any] = {"groups": groups, "group_size": None}
    job = launch(run_dir, *words, **shape, script="pretrain_gpt.py", inject=inject)
    job.finish(code, timeout_s=500)
    return job, "" if code else digest(run_dir / "save" / f"iter_{steps:07d}", optimizer=True)


def reported(job: Job) -> str:
    """What the coordinator reported of its decisions."""
    return (job.run_dir / "launch.out").read_text()


@pytest.mark.timeout(600)
def test_the_bits_do_not_depend_on_failures_groups_or_the_schedule(tmp_path: Path, dense: str) -> None:
    inject = ("sigkill:group=1,step=2,at=reduce", "sigkill:group=0,position=1,step=4,at=backward,n=1")
    assert train(tmp_path / "killed", 3, DENSE, *inject)[1] == dense
    tickets = (*DENSE, "--spare-schedule", "tickets")
    inject = ("slow=1.5:group=0,step=3,at=forward,n=1", "sigkill:group=1,step=3,at=forward,n=1")
    job, found = train(tmp_path / "two", 2, tickets, *inject)
    assert found == dense
    [recovery] = [line["recovery"] for line in job.metrics if line["recovery"]]
    assert recovery["pieces_joined"] > 0, recovery


@pytest.mark.timeout(600)
def test_flipped_bits_are_found_named_and_leave_no_trace(tmp_path: Path, dense: str) -> None:
    inject = ("bitflip:group=0,position=1,step=1,at=reduce", "bitflip:group=1,position=0,step=2,at=optimizer")
    inject += ("bitflip:group=2,position=0,step=4,at=accumulate",)
    job, found = train(tmp_path / "sums", 3, DENSE, *inject)
    assert found == dense
    assert "group 0 failed step 1 in epoch 1: rank 1: the reduced result of" in reported(job)
    place = (
        "group 1 (rank 0) diverged: its weights after step 2 differ from the majority's: in exp_avg_sq of state shard 2"
    )
    assert place in reported(job)
    assert "group 2 corrupt: rank 0: the accumulator of" in reported(job)
    job, found = train(tmp_path / "weights", 3, DENSE, f"bitflip:group=0,position=1,step={STEPS},at=weights")
    assert found == dense
    place = f"group 0 (rank 1) diverged: its weights after step {STEPS} differ from the majority's: in "
    assert place in reported(job)


@pytest.mark.timeout(600)
def test_two_groups_with_different_weights_stop_and_name_the_good_checkpoint(tmp_path: Path) -> None:
    inject = "bitflip:group=0,position=0,step=3,at=weights"
    job, _ = train(tmp_path, 2, (*DENSE, "--save-interval", "1"), inject, code=1)
    assert "the weights after step 3 differ between groups and no majority agrees" in reported(job)
    assert "the last good checkpoint is step 2" in reported(job)
    kept = sorted(path.name for path in (tmp_path / "save").glob("iter_*"))
    assert kept == ["iter_0000001", "iter_0000002"], "group 0 saves: its step 3 has the damaged weights"


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("groups", "flags"),
    [
        pytest.param(2, EXPERTS, marks=pytest.mark.full),
        pytest.param(2, INNER, marks=pytest.mark.full),
        pytest.param(2, (*INNER, SPLIT), marks=pytest.mark.full),
        (2, (*EXPERTS_SPLIT, SPLIT)),
    ],
    ids=["MoE EP2 TP2 bf16", "D2 fp16 recompute", "D2 fp16 split optimizer", "MoE EP2 split optimizer"],
)
def test_experts_and_inner_data_ranks_too(tmp_path: Path, groups: int, flags: tuple[str, ...]) -> None:
    _, failure_free = train(tmp_path / "failure-free", 1, flags)
    _, killed = train(tmp_path / "killed", groups, flags, "sigkill:group=1,step=3,at=backward")
    assert killed == failure_free


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("reduce", ["exact", "exact32"])
def test_groups_that_share_a_gpu_too(tmp_path: Path, reduce: str) -> None:
    """Computing and kernels on the GPU, sums over groups on the host: NCCL wants a GPU for each rank."""
    flags = ("--bf16", "--global-batch-size", "12", "--spare-comm", "gloo", "--spare-reduce", reduce)
    _, failure_free = train(tmp_path / "failure-free", 3, flags)
    _, killed = train(tmp_path / "killed", 3, flags, "sigkill:group=1,step=3,at=reduce")
    assert killed == failure_free


@pytest.mark.timeout(600)
def test_32_bits_leave_no_trace_either(tmp_path: Path) -> None:
    flags = (*DENSE, "--spare-reduce", "exact32")
    inject = ("sigkill:group=2,step=3,at=reduce", "bitflip:group=0,position=1,step=4,at=reduce")
    job, killed = train(tmp_path / "killed", 3, flags, *inject)
    assert "group 0 failed step 4 in epoch 2: rank 1: the reduced result of" in reported(job)
    assert killed == train(tmp_path / "failure-free", 1, flags)[1]


@pytest.mark.full
@pytest.mark.timeout(600)
def test_bf16_on_the_wire_keeps_to_its_tolerance(tmp_path: Path) -> None:
    losses = []
    for mode in ("exact", "bf16"):
        job, _ = train(tmp_path / mode, 2, (*DENSE, "--spare-reduce", mode))
        losses.append([line["loss"] for line in job.metrics])
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert losses[1] != losses[0]


@pytest.mark.timeout(600)
def test_a_group_that_is_relieved_of_its_pieces_leaves_the_same_bits(tmp_path: Path) -> None:
    flags = (*DENSE[:-1], "24")
    failure_free = train(tmp_path / "failure-free", 1, flags)[1]
    relief = ("--spare-schedule", "tickets", "--spare-relief", "--spare-heartbeat-timeout-s", "10")
    job, found = train(tmp_path / "slow", 3, (*flags, *relief), "slow=4x:group=1,step=2")
    assert found == failure_free
    assert sum(line["pieces_given"] for line in job.metrics) > 0, job.metrics
    assert not any(line["recovery"] for line in job.metrics)
