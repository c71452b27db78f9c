"""What a running job asks: redundancy and save interval from its own first figures, and later from its losses.

Called by whoever has measured; nothing here measures. A choice comes with its reason and can be journalled as it is.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from math import ceil, inf
from typing import Literal

from spare_megatron.config.errors import ConfigError
from spare_megatron.theory.published import best_availability, best_interval_s
from spare_megatron.tuner.choose import candidate, choose
from spare_megatron.tuner.cluster_figures import LLAMA3_MTBF_GPU_HOURS, ClusterFigures

UPDATE_FACTOR_MAX = 4.0
"""An updated interval stays within this factor of the one chosen at the start."""
UPDATE_CHANGE_MIN = 0.2
"""A smaller relative change is not worth announcing."""
PRIOR_LOSSES = 2.0
"""The rate given at the start counts like this many observed losses."""


@dataclass(frozen=True)
class Measured:
    """A job at its start."""

    num_groups: int
    group_size: int
    restart_s: float
    """From the start of the processes to the first step."""
    save_s: float
    """Time that a trial save kept training waiting."""
    compute_s: float
    """Compute of one shard, median of the first steps."""
    reduce_s: float
    pieces_per_shard: int
    steps: int
    """Steps that are left."""
    mtbf_gpu_hours: float | None = None
    granularity: Literal["microbatch", "shard"] = "microbatch"
    data: Literal["shared", "staged"] = "staged"
    rejoin_s: float | None = None
    standby_groups: int = 0
    redundancy: int | None = None
    """In effect: kept, as a placement lasts as long as the processes."""
    redundancy_is_free: bool = False
    """The next start may have another one: the choice says which."""
    write_s: float = 0.0
    """From the step to the checkpoint that counts: the next save cannot come earlier."""
    planned_restarts: bool = False
    """Whether the job carries out planned restarts; without them saves must cover every wipe-out."""
    save_interval_steps: int | None = None
    """As given: kept. None: chosen."""


@dataclass(frozen=True)
class Choice:
    """What the job uses, and why."""

    redundancy: int
    save_interval_steps: int
    save_interval_s: float
    restart_after_failures: int | None
    mtbf_s: float
    """Of the whole job, as assumed."""
    time_to_train_ratio: float | None
    """None: no progress is expected."""
    endurable_failures: float
    reason: str
    redundancy_next: int | None = None
    """What the next start of the job should have, where that is free and not what is in effect."""

    def as_json(self) -> dict[str, object]:
        """For the journal and a checkpoint's metadata."""
        return asdict(self)

    def rows(self) -> list[tuple[str, str]]:
        """A small table for people."""
        planned, ratio = self.restart_after_failures, self.time_to_train_ratio
        later = "" if self.redundancy_next is None else f", {self.redundancy_next} from the next start on"
        return [
            ("redundancy", f"{self.redundancy}{later}"),
            ("save interval", f"{self.save_interval_steps} steps ({self.save_interval_s:.0f} s)"),
            ("planned restart", "none" if planned is None else f"after {planned} losses"),
            ("mean time between losses", f"{self.mtbf_s:.0f} s"),
            ("losses endured", f"{self.endurable_failures:.1f}"),
            ("time to train / failure-free", "none" if ratio is None else f"{ratio:.3f}"),
        ]


def at_start(measured: Measured) -> Choice:
    """The choice for these figures; ConfigError when no redundancy makes progress or a figure is impossible."""
    mtbf_s, source = _mtbf_s(measured)
    choice = _choice(measured, mtbf_s, source)
    return _with_the_next(measured, choice)


def _with_the_next(measured: Measured, choice: Choice) -> Choice:
    """The choice, and what the next start should have, where that is free, another one and makes progress."""
    if not measured.redundancy_is_free or measured.redundancy is None:
        return choice
    try:
        free = _choice(replace(measured, redundancy=None), *_mtbf_s(measured))
    except ConfigError:
        return choice
    if free.redundancy == choice.redundancy:
        return choice
    later = (
        f"the next start of the job takes redundancy {free.redundancy}, as a placement lasts as long as the processes"
    )
    return replace(choice, redundancy_next=free.redundancy, reason=f"{choice.reason}; {later}")


def _mtbf_s(measured: Measured) -> tuple[float, str]:
    """Of the whole job, and where it is from."""
    hours = LLAMA3_MTBF_GPU_HOURS if measured.mtbf_gpu_hours is None else measured.mtbf_gpu_hours
    if not 0 < hours < inf:
        raise ConfigError(f"--spare-mtbf-gpu-hours is {hours}, but must be a finite number above 0")
    source = "default of 49,152 GPU hours, Llama 3" if measured.mtbf_gpu_hours is None else f"{hours:g} GPU hours"
    return hours * 3600 / (measured.num_groups * measured.group_size), source


def without_progress(measured: Measured, why: str) -> Choice:
    """What a job does for which :func:`at_start` finds no progress: it was started all the same. A save costs a tenth
    of the time, where the interval is chosen."""
    step_s = measured.compute_s + measured.reduce_s
    steps, words = _interval(measured, max(1, ceil(9 * measured.save_s / step_s)))
    best = "saves take a tenth of the time" if measured.save_interval_steps is None else words
    reason = f"{why}; {best}"
    kept = Choice(measured.redundancy or 1, steps, steps * step_s, None, _mtbf_s(measured)[0], None, 0.0, reason)
    return _with_the_next(measured, kept)


def restart_pays(measured: Measured, live: int, steps_left: int) -> bool:
    """Whether a restart with all groups costs less than the rest of the job costs more on ``live`` groups."""
    slower_s = measured.compute_s * (measured.num_groups / live - 1)
    return steps_left * slower_s > measured.restart_s + measured.save_s


def _interval(measured: Measured, best_steps: int) -> tuple[int, str]:
    """The steps between saves that the job keeps to, and the words for them."""
    best = _at_least_a_write(measured, best_steps)
    given = measured.save_interval_steps
    if given is None:
        return best, f"a save every {best} steps"
    return given, f"a save every {given} steps as given" + (f", {best} would be best" if best != given else "")


def _at_least_a_write(measured: Measured, steps: int) -> int:
    return max(steps, ceil(measured.write_s / (measured.compute_s + measured.reduce_s)))


def updated_interval(
    measured: Measured, choice: Choice, losses: int, elapsed_s: float, present_steps: int | None = None
) -> Choice | None:
    """The choice at the start with the save interval for the losses seen in this time; None where that hardly differs
    from ``present_steps`` (default: the choice's).

    The rate is that of a gamma prior worth ``PRIOR_LOSSES`` losses at the first assumption; the redundancy stays."""
    present = present_steps or choice.save_interval_steps
    mtbf_s = (elapsed_s + PRIOR_LOSSES * choice.mtbf_s) / (losses + PRIOR_LOSSES)
    source = f"{losses} losses in {elapsed_s:.0f} s"
    try:
        fresh = _choice(replace(measured, redundancy=choice.redundancy), mtbf_s, source)
        wanted = float(fresh.save_interval_steps)
    except ConfigError:
        wanted = 1.0
    low = choice.save_interval_steps / UPDATE_FACTOR_MAX
    steps = max(1, round(min(max(wanted, low), choice.save_interval_steps * UPDATE_FACTOR_MAX)))
    steps = _at_least_a_write(measured, steps)
    if abs(steps - present) < max(1.0, UPDATE_CHANGE_MIN * present):
        return None
    step_s = choice.save_interval_s / choice.save_interval_steps
    reason = (
        f"save interval {present} -> {steps} steps: {source} make one every {mtbf_s:.0f} s, "
        f"{choice.mtbf_s:.0f} s were assumed (at most a factor {UPDATE_FACTOR_MAX:g} from the start's)"
    )
    return replace(choice, save_interval_steps=steps, save_interval_s=steps * step_s, reason=reason)


def _choice(measured: Measured, mtbf_s: float, source: str) -> Choice:
    if measured.num_groups == 1 or measured.redundancy == 1:
        return _unmasked(measured, mtbf_s, source)
    cluster = ClusterFigures(
        gpus=measured.num_groups * measured.group_size,
        gpus_per_group=measured.group_size,
        mtbf_s=mtbf_s,
        restart_s=measured.restart_s,
        save_s=measured.save_s,
        compute_s=measured.compute_s,
        reduce_s=measured.reduce_s,
        pieces_per_shard=measured.pieces_per_shard,
        rejoin_s=measured.rejoin_s,
        standby_groups=measured.standby_groups,
        granularity=measured.granularity,
        data=measured.data,
        steps=max(1, measured.steps),
        planned_restarts=measured.planned_restarts,
    )
    if measured.redundancy is not None:
        chosen = candidate(cluster, measured.redundancy)
        kept = "in effect" if measured.redundancy_is_free else "as given"
        reason = f"redundancy {measured.redundancy} {kept}"
    else:
        plan = choose(cluster)
        chosen, reason = plan.chosen, plan.reason
    found = chosen.outcome
    if found is None:
        raise ConfigError(
            f"--spare-redundancy {chosen.redundancy} endures {chosen.endurable_failures:.1f} losses, one every "
            f"{mtbf_s:.0f} s ({source}): too few for a restart of {measured.restart_s:g} s; use a larger one or 'auto'"
        )
    steps, words = _interval(measured, found.interval_steps)
    return Choice(
        redundancy=chosen.redundancy,
        save_interval_steps=steps,
        save_interval_s=found.interval_s * steps / found.interval_steps,
        restart_after_failures=found.restart_after,
        mtbf_s=mtbf_s,
        time_to_train_ratio=found.ratio,
        endurable_failures=chosen.endurable_failures,
        reason=f"{reason}; a loss every {mtbf_s:.0f} s ({source}), {words}",
    )


def _unmasked(measured: Measured, mtbf_s: float, source: str) -> Choice:
    """No loss can be masked: every one is a restart, and only the interval is chosen."""
    step_s = measured.compute_s + measured.reduce_s
    interval_s = max(step_s, best_interval_s(mtbf_s, measured.restart_s, measured.save_s))
    steps, words = _interval(measured, max(1, round(interval_s / step_s)))
    available = best_availability(mtbf_s, measured.restart_s, measured.save_s)
    if available <= 0:
        raise ConfigError(
            f"a loss every {mtbf_s:.0f} s ({source}) leaves no progress between restarts of {measured.restart_s:g} s; "
            "use more groups and --spare-redundancy 2 or more"
        )
    reason = f"one host per shard: every loss, one every {mtbf_s:.0f} s ({source}), is a restart; {words}"
    return Choice(1, steps, steps * step_s, None, mtbf_s, 1 / available, 0.0, reason)
