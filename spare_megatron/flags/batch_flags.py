"""The flags of batch sizes: the job's plan of batches, and what does not go with a schedule of them.

Imports neither torch nor megatron.
"""

from __future__ import annotations

from argparse import Namespace

from spare_megatron.config.batches import SCHEDULE, BatchPlan, Point, schedule_points
from spare_megatron.config.errors import ConfigError
from spare_megatron.config.shape import JobShape


def points_of(ns: Namespace) -> tuple[Point, ...]:
    """The points of ``--step-batch-size-schedule``; empty where it is not given. ConfigError for a schedule that is
    none, and for flags that do not go with one."""
    text = ns.step_batch_size_schedule
    if text is None:
        return ()
    beside = {
        "--global-batch-size": "--global-batch-size" in ns.spare_given,
        "--rampup-batch-size": ns.rampup_batch_size is not None,
        "--decrease-batch-size-if-needed": ns.decrease_batch_size_if_needed,
    }
    for flag, given in beside.items():
        if given:
            raise ConfigError(f"{flag} does not go with {SCHEDULE} '{text}', which says all batch sizes; leave one out")
    if ns.train_samples is None:
        raise ConfigError(
            f"{SCHEDULE} '{text}' needs --train-samples: with --train-iters nobody knows of how many samples the job "
            "and the phases of its learning rate are; give --train-samples, --lr-decay-samples and --lr-warmup-samples"
        )
    return schedule_points(text, ns.seq_length)


def resolve_largest(ns: Namespace, data_parallel: int) -> None:
    """Set the global batch size where it is not given: the largest of the schedule, or one microbatch of each of the
    ``data_parallel`` ranks."""
    points = points_of(ns)
    if points:
        unit = data_parallel * ns.micro_batch_size
        for _, size in points:
            if size % unit:
                low = size // unit * unit
                raise ConfigError(
                    f"{SCHEDULE} '{ns.step_batch_size_schedule}': the batch size {size} is not a multiple of {unit} = "
                    f"{data_parallel} data-parallel ranks x --micro-batch-size {ns.micro_batch_size}; use "
                    f"{f'{low} or ' if low else ''}{low + unit}"
                )
        ns.global_batch_size = max(size for _, size in points)
        if ns.eval_iters and ns.eval_global_batch_size is None:
            ns.spare_notes += (
                f"{SCHEDULE}: an evaluation's batch has {ns.global_batch_size} samples, as the largest training batch",
            )
    elif ns.global_batch_size is None:
        ns.global_batch_size = ns.micro_batch_size * data_parallel


def batch_plan(ns: Namespace, shape: JobShape) -> BatchPlan:
    """The plan of batch sizes, step by step."""
    return _plan(ns, shape.num_groups * shape.microbatch_samples)


def train_samples(ns: Namespace) -> int:
    """Number of samples of a job with these resolved flags, from its first step to its last: as given, or those of
    --train-iters steps along its plan of batches."""
    plan = _plan(ns, ns.data_parallel_size * ns.micro_batch_size)
    return int(ns.train_samples or plan.samples_of(ns.train_iters))


def _plan(ns: Namespace, unit: int) -> BatchPlan:
    ramp, round_down = ns.rampup_batch_size, ns.decrease_batch_size_if_needed
    return BatchPlan(ns.global_batch_size, unit, ramp, round_down, points_of(ns))


def check_evaluation(ns: Namespace) -> None:
    """ConfigError where an evaluation's batches are not the training's: its pieces are those of a full batch."""
    for name, size in (("global", ns.global_batch_size), ("micro", ns.micro_batch_size)):
        given = getattr(ns, f"eval_{name}_batch_size")
        if given not in (None, size):
            raise ConfigError(
                f"--eval-{name}-batch-size {given} is not the training's {size}: an evaluation is computed with the "
                "pieces of a full training batch, so that a lost group's share of it can move; leave it out or use "
                f"{size}"
            )
