"""Two real runs with a growing batch, the second from the first one's checkpoint with other ranks: the learning rate
and the batch of every step are those of the published formulas."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.process.harness import launch
from tests.pure.test_resume_matrix import rate, sizes

STEPS, RAMP, FULL = 8, (4, 4, 16), 12
WORDS = (
    *("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "100", "--num-layers", "2"),
    *("--hidden-size", "16", "--num-attention-heads", "2", "--seq-length", "16", "--max-position-embeddings", "16"),
    *("--micro-batch-size", "1", "--global-batch-size", str(FULL), "--rampup-batch-size", *map(str, RAMP)),
    *("--train-iters", str(STEPS), "--lr", "1e-2", "--min-lr", "1e-3", "--lr-warmup-iters", "2", "--eval-iters", "0"),
)


@pytest.mark.timeout(300)
def test_rate_and_batch_follow_the_formulas_over_a_restart(tmp_path: Path) -> None:
    save = ("--save", str(tmp_path / "save"), "--save-interval", "3")
    first = launch(
        tmp_path / "first",
        *(*WORDS, *save, "--exit-interval", "3"),
        groups=2,
        group_size=None,
        script="pretrain_gpt.py",
    )
    lines = first.finish(timeout_s=120)
    second = launch(
        tmp_path / "second",
        *(*WORDS, "--load", str(tmp_path / "save"), "--pipeline-model-parallel-size", "2", "--num-workers", "0"),
        groups=1,
        group_size=None,
        script="pretrain_gpt.py",
    )
    lines += second.finish(timeout_s=120)
    taken = sizes(FULL, RAMP, 0, STEPS)
    assert len(set(taken)) == 3, "the batch grew"
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    # as Megatron prints it: the rate after the step's samples
    wanted = [rate(sum(taken[:n]), sum(taken[:2]), sum(taken), 1e-2, 1e-3, "linear") for n in range(1, STEPS + 1)]
    assert [line["lr"] for line in lines] == pytest.approx(wanted, rel=1e-6)
    assert lines[-1]["lr"] == pytest.approx(1e-3), "it ends at its minimum"
    assert [line["tokens"] for line in lines] == [16 * size for size in taken]
