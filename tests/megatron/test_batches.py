"""Batch sizes that change: step for step those of megatron-core's calculators, also from the middle of a job on."""

from __future__ import annotations

import random
from typing import Any

import pytest

from spare_megatron.config.batches import BatchPlan, schedule_points
from spare_megatron.config.errors import ConfigError


def calculator_class(name: str) -> Any:
    """A calculator of megatron-core. 0.16 and 0.17 have ramps, 0.18 and later have schedules."""
    from spare_megatron.megatron_adapter.shims import install_cpu_shims

    install_cpu_shims()
    from megatron.core import num_microbatches_calculator

    if not hasattr(num_microbatches_calculator, name):
        pytest.skip(f"this megatron-core has no {name}")
    return getattr(num_microbatches_calculator, name)


def calculator(plan: BatchPlan) -> Any:
    """megatron-core's own, of a ramp."""
    assert plan.ramp is not None
    first, increment, samples = plan.ramp
    ramp = calculator_class("RampupBatchsizeNumMicroBatchesCalculator")
    return ramp(plan.full, plan.unit, 1, plan.round_down, 0, first, increment, samples)


def plans(seed: int, count: int) -> list[BatchPlan]:
    """Random ramps; ``unit`` stands for N x D x micro batch size."""
    draw, made = random.Random(seed), []
    while len(made) < count:
        unit, stages = draw.choice((1, 2, 3, 4)), draw.randint(1, 5)
        first, increment = unit * draw.randint(1, 3), unit * draw.randint(1, 3)
        loose = draw.random() < 0.3
        if loose:
            first, increment = first + draw.randint(0, 1), increment + draw.randint(0, 2)
        full = first + stages * increment
        if full % unit == 0:
            made.append(BatchPlan(full, unit, (first, increment, draw.randint(1, 300)), loose))
    return made


@pytest.mark.parametrize("plan", plans(seed=7, count=60), ids=str)
def test_sizes_are_those_of_megatron(plan: BatchPlan) -> None:
    other, schedule, consumed = calculator(plan), plan.schedule(), 0
    middle = random.Random(plan.full).randint(2, 40)
    resumed = plan.schedule(middle, schedule.consumed_before(middle))
    for step in range(1, 120):
        other.update(consumed, not plan.round_down)
        size = other.get_current_running_global_batch_size()
        assert (schedule.size(step), schedule.consumed_before(step)) == (size, consumed), step
        if step >= middle:
            assert (resumed.size(step), resumed.consumed_before(step)) == (size, consumed), step
        consumed += size


@pytest.mark.parametrize("plan", plans(seed=8, count=20), ids=str)
def test_steps_of_a_job_given_in_samples(plan: BatchPlan) -> None:
    other = calculator(plan)
    for samples in (plan.full, 3 * plan.full + 1, 40 * plan.full):
        steps = consumed = 0
        assert plan.ramp is not None
        while consumed <= plan.ramp[2] and consumed <= samples:
            other.update(consumed, False)
            consumed += other.get_current_running_global_batch_size()
            steps += 1
        steps += max(0, samples - consumed) // plan.full
        assert plan.steps_for(samples) == steps


@pytest.mark.parametrize(
    ("text", "seq_length"),
    [("0:4 128:16 1K:8", 16), ("0:384 200B:768 400B:1152", 4096), ("1.5K:8,0:4", 10), ("0:12 7:4 40:20 41:8", 1)],
)
def test_sizes_of_a_schedule_are_those_of_megatron(text: str, seq_length: int) -> None:
    other = calculator_class("StepBatchsizeNumMicroBatchesCalculator")(1, 1, False, 1, text, seq_length)
    points = schedule_points(text, seq_length)
    assert list(points) == other.schedule
    schedule, consumed = BatchPlan(max(size for _, size in points), 1, points=points).schedule(), 0
    for step in range(1, 200):
        other.update(consumed, consistency_check=True)
        size = other.get_current_running_global_batch_size()
        assert (schedule.size(step), schedule.consumed_before(step)) == (size, consumed), step
        consumed += size


@pytest.mark.parametrize(
    ("ramp", "sentence"),
    [
        ((2, 4, 100), "from 2 to --global-batch-size 16 are 14 samples, not a multiple of the increment 4"),
        ((32, 4, 100), "does not begin between 1 and --global-batch-size 16"),
        ((2, 2, 100), "the batch size 2 is not a multiple of 4.*or begin at 4"),
        ((4, 6, 100), "the batch size 10 is not a multiple of 4.*or add --decrease-batch-size-if-needed"),
    ],
)
def test_a_ramp_that_cannot_be_shared_out_is_refused(ramp: tuple[int, int, int], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        BatchPlan(16, 4, ramp)
