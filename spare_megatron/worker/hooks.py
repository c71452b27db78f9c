"""Makes the hooks that a job's flags ask for on one rank: profiles, memory, timers, garbage collection."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from spare_megatron.megatron_adapter import diagnostics
from spare_megatron.megatron_adapter.model.replica import Replica
from spare_megatron.megatron_adapter.timers import timers_text
from spare_megatron.worker import user_state
from spare_megatron.worker.job_arguments import JobArguments
from spare_megatron.worker.profiling import StepProfiler, record_memory
from spare_megatron.worker.reporting import StepHooks, collect_garbage_by_hand, give_memory_back

log = logging.getLogger(__name__)


def hooks_of(job: JobArguments, replica: Replica) -> tuple[StepHooks, Callable[[], None]]:
    """The hooks, and a function that ends them, to be called when the rank leaves."""
    before: list[Callable[[int], None]] = []
    reduced: list[Callable[[int], None]] = []
    after: list[Callable[[int], None]] = []
    sources: list[Callable[[int], Mapping[str, Any]]] = []
    logs, training = job.logging, job.training
    replica.config.timers, replica.config.barrier_with_L1_time = user_state.get_timers(), False
    if logs.log_params_norm:
        sources.append(lambda _step: {"params_norm": diagnostics.params_norm(replica)})
    if logs.log_memory_to_tensorboard:
        sources.append(lambda _step: {"memory": diagnostics.memory(logs.log_device_memory_used)})
    after.append(_log_memory(job))
    after.append(_log_timers(job))
    if training.manual_gc:
        before_evaluation = job.evaluation.eval_interval if training.manual_gc_eval else None
        after.append(collect_garbage_by_hand(training.manual_gc_interval, before_evaluation))
    if training.empty_unused_memory_level >= 1:
        reduced.append(give_memory_back)
    if training.empty_unused_memory_level >= 2:
        after.append(give_memory_back)
    profiler = _profiler(job)
    if profiler is not None:
        before.append(profiler.before)
        after.append(profiler.after)
    if logs.record_memory_history and job.place.position == job.place.group_size - 1:
        after.append(record_memory(Path(logs.memory_snapshot_path), logs.log_interval))
    return StepHooks(before, reduced, after, sources), profiler.close if profiler else lambda: None


def _rank(job: JobArguments) -> int:
    return job.place.group * job.shape.group_size + job.place.position


def _profiler(job: JobArguments) -> StepProfiler | None:
    logs = job.logging
    if not logs.profile or _rank(job) not in logs.profile_ranks:
        return None
    home = logs.tensorboard_dir or job.place.run_dir or "."
    return StepProfiler(
        logs.profile_step_start,
        logs.profile_step_end,
        Path(home) / "profiles",
        f"rank-{_rank(job)}.steps-{logs.profile_step_start}-{logs.profile_step_end}",
        logs.use_pytorch_profiler,
    )


def _log_memory(job: JobArguments) -> Callable[[int], None]:
    """A hook that writes memory figures into the rank's log: every ``--log-memory-interval`` steps or, as in Megatron,
    once after the first log interval."""
    logs = job.logging
    once = [logs.log_memory_interval is None]

    def show(step: int) -> None:
        every = logs.log_memory_interval
        due = step % every == 0 if every else once[0] and step % logs.log_interval == 0
        if due:
            once[0] = False
            values = diagnostics.memory(logs.log_device_memory_used).items()
            log.info("memory after step %d: %s", step, " | ".join(f"{name} {value:.0f}" for name, value in values))

    return show


def _log_timers(job: JobArguments) -> Callable[[int], None]:
    """A hook that writes the timers of megatron-core and of users' code into the log of the group's last rank, once in
    each log interval. Collective in the group.
    """
    interval = job.logging.log_interval

    def show(step: int) -> None:
        if step % interval == 0:
            text = timers_text(user_state.get_timers(), interval)
            if text and job.place.position == job.place.group_size - 1:
                log.info("step %d: %s", step, " ".join(text.split()))

    return show
