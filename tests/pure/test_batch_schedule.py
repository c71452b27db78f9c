"""--step-batch-size-schedule: Megatron's sizes at every step, from any step on, and one sentence for what is none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from spare_megatron.config.batches import BatchPlan, Point, schedule_points
from spare_megatron.config.errors import ConfigError
from spare_megatron.metrics.metrics import RealPieces
from tests.pure.flags_of_a_job import job_of, launched

SAMPLES = ("--train-iters",)
"""The small job's flag that a job of samples leaves out."""


def plan(points: Sequence[Point], unit: int = 1) -> BatchPlan:
    return BatchPlan(max(size for _, size in points), unit, points=tuple(points))


def naive(points: Sequence[Point], consumed: int = 0) -> Iterator[tuple[int, int]]:
    """Megatron's rule, asked before every step: (samples consumed before it, its size)."""
    while True:
        size = [size for at, size in points if consumed >= at][-1]
        yield consumed, size
        consumed += size


SCHEDULES: list[list[Point]] = [
    [(0, 8)],
    [(0, 4), (8, 8), (100, 16)],
    [(0, 12), (7, 4), (40, 20), (41, 8)],
    [(0, 100), (10, 1), (20, 2), (30, 3), (1000, 50)],
]


@pytest.mark.parametrize("points", SCHEDULES)
def test_sizes_are_those_of_megatrons_rule_from_any_step_on(points: list[Point]) -> None:
    steps = [step for step, _ in zip(naive(points), range(60), strict=False)]
    for first in (1, 2, 3, 7, 31):
        schedule = plan(points).schedule(first, steps[first - 1][0])
        for step in range(first, 61):
            assert (schedule.consumed_before(step), schedule.size(step)) == steps[step - 1], (first, step)


@pytest.mark.parametrize("points", SCHEDULES)
def test_a_job_of_samples_ends_with_the_step_that_reaches_them(points: list[Point]) -> None:
    for samples in (1, 3, 8, 99, 100, 101, 500):
        steps = next(n for n, (consumed, _) in enumerate(naive(points)) if consumed >= samples)
        assert plan(points).steps_for(samples) == steps


def test_a_resumed_job_with_a_smaller_batch_counts_the_pieces_of_its_full_one() -> None:
    resumed = plan([(0, 16), (32, 8)]).schedule(5, 100)
    assert resumed.phases == ((5, 100, 8),)
    assert RealPieces(resumed, pieces_per_shard=4, full=16)(5, range(8)) == 4


def test_thresholds_are_tokens_with_units() -> None:
    assert schedule_points("0:768 250B:1536, 500b:3K", 4096) == ((0, 768), (61_035_156, 1536), (122_070_312, 3000))
    assert schedule_points("1.5K:8 0:4", 10) == ((0, 4), (150, 8))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "has no batch size for the first step; begin it with 0:SIZE"),
        ("5K:8", "has no batch size for the first step; begin it with 0:SIZE"),
        ("0:8 64:16 65:8", "has two batch sizes from 1 samples of 64 tokens on; leave one of them out"),
        ("0:0", "has the batch size 0 from 0 samples on, but it must be at least 1"),
        ("0:8 1G:16", "has the entry '1G:16', but takes TOKENS:SIZE"),
        ("0-8", "has the entry '0-8', but takes TOKENS:SIZE"),
        ("0:8 -5:16", "has the entry '-5:16', but takes TOKENS:SIZE"),
    ],
)
def test_what_is_no_schedule_is_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as error:
        schedule_points(text, 64)
    assert "\n" not in str(error.value)


def test_the_jobs_batches_follow_it() -> None:
    words = "--step-batch-size-schedule 0:8,1K:16,4K:8 --train-samples 100 --eval-global-batch-size 16"
    job, namespace = job_of(words, launched(4), drop=SAMPLES)
    assert (job.shape.global_batch_size, namespace.global_batch_size) == (16, 16)
    assert job.batches.changes
    assert job.batches.schedule().phases == ((1, 0, 8), (3, 16, 16), (6, 64, 8))
    assert job.train_iters == 10, "2 x 8, 3 x 16 and 5 x 8 are 104 samples, the first 10 steps that make 100"
    assert not any("evaluation's batch" in note for note in job.notes)
    job, _ = job_of(words.partition(" --eval")[0], launched(4), drop=SAMPLES)
    assert any("an evaluation's batch has 16 samples, as the largest" in note for note in job.notes)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--global-batch-size 8", "--global-batch-size does not go with --step-batch-size-schedule '0:8,1K:16'"),
        ("--rampup-batch-size 4 4 100", "--rampup-batch-size does not go with --step-batch-size-schedule"),
        ("--decrease-batch-size-if-needed", "--decrease-batch-size-if-needed does not go with"),
        ("--train-iters 5", "needs --train-samples: with --train-iters nobody knows of how many samples"),
        (
            "--micro-batch-size 4",
            "'0:8,1K:16': the batch size 8 is not a multiple of 16 = 4 data-parallel ranks x --micro-batch-size 4; "
            "use 16$",
        ),
        ("--micro-batch-size 3", "the batch size 8 is not a multiple of 12 = .*; use 12$"),
        (
            "--eval-global-batch-size 8",
            "--eval-global-batch-size 8 is not the training's 16: .* leave it out or use 16",
        ),
        ("--eval-micro-batch-size 2", "--eval-micro-batch-size 2 is not the training's 1: .* leave it out or use 1"),
    ],
)
def test_what_does_not_go_with_it(words: str, sentence: str) -> None:
    samples = "" if "--train-iters" in words else "--train-samples 100"
    with pytest.raises(ConfigError, match=sentence):
        job_of(f"--step-batch-size-schedule 0:8,1K:16 {samples} {words}", launched(4), drop=SAMPLES)
