"""Flags that follow the steps (a batch that grows and shrinks, figures, profiles) do the same whoever dies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spare_megatron.checkpoint.saved_args import read_args
from spare_megatron.config.batches import BatchPlan, schedule_points
from spare_megatron.megatron_adapter.checkpoint.digest import digest
from tests.process.harness import launch

STEPS = 10
SIZES = BatchPlan(full=16, unit=2, points=schedule_points("0:4 128:16 1K:8", 16))
FLAGS = (
    *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "16"),
    *("--max-position-embeddings", "16", "--micro-batch-size", "1", "--lr", "1e-3", "--num-workers", "0"),
    *("--train-samples", "100", "--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "63"),
    *("--step-batch-size-schedule", "0:4 128:16 1K:8", "--split", "90,10,0"),
    *("--eval-interval", "4", "--eval-iters", "1", "--log-interval", "2", "--save-interval", "5"),
    *("--log-params-norm", "--log-num-zeros-in-grad", "--log-memory-to-tensorboard", "--log-timers-to-tensorboard"),
    *("--log-validation-ppl-to-tensorboard", "--timing-log-level", "2", "--manual-gc", "--manual-gc-interval", "3"),
    *("--log-progress", "--overlap-grad-reduce", "--ddp-average-in-collective", "--spare-heartbeat-timeout-s", "60"),
)
WITHOUT_EFFECT = (
    *("--verify-integrity", "--async-strategy", "nvrx", "--async-ckpt-use-cpu-shm", "--ckpt-format", "fsdp_dtensor"),
    *("--use-megatron-fsdp", "--data-parallel-sharding-strategy", "optim_grads_params"),
    *("--cuda-graph-impl", "local", "--cuda-graph-modules", "attn", "mlp", "--te-rng-tracker"),
    *("--profile", "--use-pytorch-profiler", "--profile-step-start", "3", "--profile-step-end", "4"),
    *("--overlap-moe-expert-parallel-comm", "--delay-wgrad-compute", "--eval-global-batch-size", "16"),
)
"""What only saves time or memory in Megatron, or always holds here; the job that is killed has these, the failure-free
one has not."""


def train(run_dir: Path, *inject: str, more: tuple[str, ...] = ()) -> tuple[list[dict[str, Any]], str]:
    """The metrics of one job of two groups, and the digest of what it saved last."""
    words = (*FLAGS, *more, "--save", str(run_dir / "save"), "--tensorboard-dir", str(run_dir / "boards"))
    shape: dict[str, Any] = {"groups": 2, "group_size": None}
    job = launch(run_dir, *words, **shape, script="pretrain_gpt.py", inject=inject)
    return job.finish(timeout_s=240), digest(run_dir / "save" / f"iter_{STEPS:07d}", optimizer=True)


@pytest.mark.timeout(600)
def test_a_scheduled_batch_and_all_figures_are_those_of_the_failure_free_run(tmp_path: Path) -> None:
    failure_free, expected = train(tmp_path / "failure-free")
    lines, found = train(tmp_path / "killed", "sigkill:group=1,step=5,at=backward,n=3", more=WITHOUT_EFFECT)
    assert found == expected
    schedule = SIZES.schedule()
    assert [schedule.size(step) for step in range(1, STEPS + 1)] == [4, 4, *[16] * 4, *[8] * 4]
    for line, other in zip(lines, failure_free, strict=True):
        step = line["step"]
        assert line["pieces"] == schedule.size(step), f"one sample a piece, step {step}"
        assert line["tokens"] == 16 * schedule.size(step)
        assert line["pieces_computed"] >= line["pieces"]
        for name in ("loss", "grad_norm", "params_norm", "num_zeros", "lr", "validation"):
            assert line.get(name) == other.get(name), f"{name} of step {step}"
        assert line["memory"]["mem-allocated-bytes"] > 2**20
        assert line["timers"].keys() == {"forward-backward", "all-grads-sync", "optimizer"}
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["step"] for line in lines if "validation" in line] == [5, 9]
    assert [line["recovery"]["lost_groups"] for line in lines if line["recovery"]] == [[1]]
    run = tmp_path / "killed"
    printed = (run / "launch.out").read_text()
    assert " | consumed samples:          104 |" in printed
    assert " params norm: " in printed
    assert [path.name for path in (run / "boards" / "profiles").iterdir()] == ["rank-0.steps-3-4.pt.trace.json"]
    progress = (run / "save" / "progress.txt").read_text()
    assert "# GPUs: 2\tStarting job\n" in progress
    assert "Saved checkpoint\tIteration: 10\t" in progress
    saved = read_args(run / "save" / f"iter_{STEPS:07d}")
    assert saved["consumed_valid_samples"] == 2 * 16, "Megatron goes on there in the validation set"
    log = (run / "logs" / "group-0" / "rank-0.log").read_text()
    assert log.count("--ddp-average-in-collective: gradients are summed over groups by our own") == 1
    for flag in ("--verify-integrity", "--ckpt-format fsdp_dtensor", "--te-rng-tracker"):
        assert log.count(f"{flag}: ") == 1, f"{flag} is said once"
    assert "forward-compute" in log
    assert "memory after step 2: mem-allocated-bytes" in log
