"""Two runs of one job with other flags between them: consumed samples, learning rate and the order of samples are those
of Megatron's published rules, which are written down here a second time and step by step."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from spare_megatron.config.job import JobDescription
from spare_megatron.data.dataset_build import Datasets, build_enough, sample_counts
from spare_megatron.data.sampling import SampleOrder
from spare_megatron.metrics.iteration_line import throughput
from spare_megatron.worker.job_arguments import JobArguments
from tests.pure.flags_of_a_job import job_of, launched

SEED = 44
RAMP = "--global-batch-size 32 --rampup-batch-size 8 8 96 --lr 1e-3 --min-lr 1e-4"

GROUPS = (1, 2, 4)
BATCHES = (16, 32)
RAMPS = ((), (8, 8, 64), (16, 16, 40))
LAYOUTS = ("", "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2", "--spare-inner-data-parallel 2")
WORKERS = (0, 2)


def sizes(full: int, ramp: tuple[int, ...], consumed: int, steps: int) -> list[int]:
    """The batch sizes of the next ``steps`` steps by Megatron's rule, asked before every step."""
    found = []
    for _ in range(steps):
        size = full
        if ramp and ramp[0] != full and consumed <= ramp[2]:
            stages = (full - ramp[0]) // ramp[1]
            size = min(full, ramp[0] + int(consumed / (ramp[2] / stages)) * ramp[1])
        found.append(size)
        consumed += size
    return found


def rate(consumed: float, warmup: float, decay: float, greatest: float, least: float, style: str) -> float:
    """The learning rate after ``consumed`` samples, by the formulas of Megatron's OptimizerParamScheduler."""
    if warmup and consumed <= warmup:
        return greatest * consumed / warmup
    if consumed > decay:
        return least
    share = (consumed - warmup) / (decay - warmup)
    coefficient = 1 - share if style == "linear" else (math.cos(math.pi * share) + 1) / 2
    return least + coefficient * (greatest - least)


@pytest.mark.parametrize(
    ("lengths", "needed", "asked"),
    [
        ({16: 16}, 16, [16]),
        ({16: 40}, 22, [16]),  # a whole epoch of documents
        ({16: 16, 22: 22}, 22, [16, 22]),
        ({16: 16}, 0, [16]),  # drawn again and again
    ],
)
def test_a_job_that_goes_on_has_the_data_set_that_megatron_builds(
    lengths: dict[int, int], needed: int, asked: list[int]
) -> None:
    """The order of samples depends on the number that was asked for: Megatron's, unless that is too few."""
    built: list[int] = []

    def build(samples: int) -> Datasets:
        built.append(samples)
        return Datasets(train=range(lengths[samples]))

    assert len(build_enough(build, 16, needed, bool).train) == lengths[asked[-1]]
    assert built == asked


@pytest.mark.parametrize("style", ["linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 3])
def test_with_a_ramp_the_learning_rate_ends_at_its_minimum(style: str, warmup: int) -> None:
    job, args = job_of(f"{RAMP} --lr-decay-style {style} --lr-warmup-iters {warmup}")
    taken = sizes(32, (8, 8, 96), 0, 20)
    fields, total = job.scheduler, sum(taken)
    assert total < 20 * 32
    assert (fields["lr_decay_steps"], fields["wd_incr_steps"]) == (total, total)
    assert fields["lr_warmup_steps"] == sum(taken[:warmup])
    assert rate(total, fields["lr_warmup_steps"], fields["lr_decay_steps"], 1e-3, 1e-4, style) == pytest.approx(1e-4)
    assert sample_counts(job.train_iters, args)[0] == total


def test_the_last_phase_of_wsd_has_the_samples_of_its_last_steps() -> None:
    job, _ = job_of(f"{RAMP} --lr-decay-style WSD --lr-wsd-decay-iters 18")
    assert job.scheduler["wsd_decay_steps"] == sum(sizes(32, (8, 8, 96), 0, 20)[2:])


def test_a_step_of_a_smaller_batch_has_a_smaller_throughput() -> None:
    job = JobDescription(global_batch_size=32, flops_per_step=4e12, world_size=2)
    assert (throughput(job, 1.0, 32), throughput(job, 1.0, 8)) == (2.0, 0.5)


def run(groups: int, batch: int, ramp: tuple[int, ...], layout: str, workers: int, more: str = "") -> JobArguments:
    flags = f"--global-batch-size {batch} --num-workers {workers} {layout} {more}"
    if ramp:
        flags += " --rampup-batch-size " + " ".join(map(str, ramp))
    return job_of(flags, launched(groups))[0]


def samples_of(job: JobArguments, order: SampleOrder, consumed: int, size: int) -> list[int]:
    """The samples of a step, over all shards and inner ranks, whatever group computes them."""
    shape = job.shape
    rows = size // order.row
    return [
        sample
        for shard, j, inner in itertools.product(range(shape.num_groups), range(rows), range(shape.inner_data))
        for sample in order.microbatch(consumed, shard * shape.microbatches_per_shard + j, inner)
    ]


def check_resumed(first: JobArguments, second: JobArguments, ramps: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    """Seven steps of one run, seven of the other from its checkpoint: each sample once, as many as Megatron's rule
    says, and the step sizes that it says."""
    consumed, seen = 0, list[int]()
    step = 0
    for job, ramp in zip((first, second), ramps, strict=True):
        schedule = job.batches.schedule(step + 1, consumed)
        order = SampleOrder(job.shape, 10_000)
        for size in sizes(job.shape.global_batch_size, ramp, consumed, 7):
            step += 1
            assert (schedule.consumed_before(step), schedule.size(step)) == (consumed, size), step
            seen += samples_of(job, order, consumed, size)
            consumed += size
    assert sorted(seen) == list(range(consumed))


def cases() -> list[tuple[tuple[object, ...], tuple[object, ...]]]:
    """Pairs of flags in which the second run changes one to all things, by a seeded choice."""
    choose = random.Random(SEED)
    whole = list(itertools.product(GROUPS, BATCHES, RAMPS, LAYOUTS, WORKERS))
    return [(choose.choice(whole), choose.choice(whole)) for _ in range(24)]


@pytest.mark.parametrize("pair", cases(), ids=str)
def test_a_resumed_run_goes_on_with_the_next_sample(pair: tuple[tuple[object, ...], tuple[object, ...]]) -> None:
    first, second = pair
    check_resumed(run(*first), run(*second), (first[2], second[2]))  # type: ignore[arg-type]


@pytest.mark.full
def test_all_pairs_of_the_matrix() -> None:
    whole = list(itertools.product(GROUPS, BATCHES, RAMPS, LAYOUTS, WORKERS))
    made = {one: run(*one) for one in whole}
    for first, second in itertools.product(whole, whole):
        check_resumed(made[first], made[second], (first[2], second[2]))


@seed(SEED)
@settings(max_examples=30)
@given(groups=st.sampled_from(GROUPS), sharding=st.booleans(), total=st.integers(32, 200), stop=st.integers(0, 12))
def test_an_epoch_of_a_shuffled_order_has_each_sample_once_over_a_restart(
    groups: int, sharding: bool, total: int, stop: int
) -> None:
    """The batch changes at the restart, and the data-parallel ranks do not."""
    more = "--dataloader-type cyclic" + ("" if sharding else " --no-data-sharding")
    first, second = run(groups, 16, (), "", 0, more), run(groups, 32, (), "", 2, more)
    row = groups * first.shape.micro_batch_size
    epoch = total - total % row
    rows: dict[int, list[int]] = {}
    consumed = 0
    while consumed < epoch:
        job = first if consumed < 16 * stop else second
        order = SampleOrder(job.shape, total, "cyclic", sharding)
        for at in range(consumed, min(consumed + job.shape.global_batch_size, epoch), row):
            rows[at] = samples_of(job, order, at, row)
        consumed += job.shape.global_batch_size
    seen = [sample for samples in rows.values() for sample in samples]
    assert len(seen) == len(set(seen)) == epoch
    assert set(seen) <= set(range(total))
