"""Chooses redundancy and save interval of a running job from its first measured figures, and later from its losses.

The caller measures; nothing here does. A choice has its reason and can be written to the journal as it is.

Promises: importing this module imports no scipy, which only choosing needs, and which takes a fifth of a second.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from importlib import import_module
from math import ceil, inf
from typing import Literal

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.plural import counted
from spare_megatron.planning.cluster_figures import LLAMA3_MTBF_GPU_HOURS, ClusterFigures
from spare_megatron.planning.published import best_availability, best_interval_s

UPDATE_FACTOR_MAX = 4.0
"""An updated save interval stays within this factor of the one chosen at the start."""
UPDATE_CHANGE_MIN = 0.2
"""An update with a smaller relative change is not made."""
PRIOR_LOSSES = 2.0
"""The loss rate assumed at the start counts like this many observed losses."""


@dataclass(frozen=True)
class Measured:
    """The figures of a job at its start. Times are in seconds."""

    num_groups: int
    group_size: int
    restart_s: float
    """Time from the start of the processes to the first step."""
    save_s: float
    """Time that training waited for a trial save."""
    compute_s: float
    """Time to compute one shard, the median of the first steps."""
    reduce_s: float
    pieces_per_shard: int
    steps: int
    """Steps that are left."""
    mtbf_gpu_hours: float | None = None
    granularity: Literal["microbatch", "shard"] = "microbatch"
    data: Literal["shared", "staged"] = "staged"
    rejoin_s: float | None = None
    standby_groups: int = 0
    adopt_s: float | None = None
    """Time in which groups open a shard that has lost its last host and that they adopt; None where they do not."""
    redundancy: int | None = None
    """The redundancy in effect, which the choice keeps, because the placement lasts as long as the processes; None
    where it is to be chosen."""
    redundancy_is_free: bool = False
    """Whether the next start of the job may have another redundancy; then the choice says which."""
    write_s: float = 0.0
    """Time from a step to the acceptance of its checkpoint; the save interval is not shorter."""
    planned_restarts: bool = False
    """Whether the job makes planned restarts."""
    save_interval_steps: int | None = None
    """The save interval that was given, which the choice keeps; None where it is to be chosen."""


@dataclass(frozen=True)
class Choice:
    """What the job uses, and why. Times are in seconds."""

    redundancy: int
    save_interval_steps: int
    save_interval_s: float
    restart_after_failures: int | None
    """The number of lost groups with which the job restarts by itself; None: it does not."""
    mtbf_s: float
    """The mean time between losses in the whole job that was assumed."""
    time_to_train_ratio: float | None
    """Expected time to train / failure-free time; None where no progress is expected."""
    endurable_failures: float
    reason: str
    redundancy_next: int | None = None
    """The redundancy that the next start of the job should have, where it is free and differs from the present one."""

    def as_json(self) -> dict[str, object]:
        """For the journal and a checkpoint's metadata."""
        return asdict(self)

    def rows(self) -> list[tuple[str, str]]:
        """The rows (name, value) of a table for users."""
        planned, ratio = self.restart_after_failures, self.time_to_train_ratio
        later = "" if self.redundancy_next is None else f", {self.redundancy_next} from the next start on"
        return [
            ("redundancy", f"{self.redundancy}{later}"),
            ("save interval", f"{counted(self.save_interval_steps, 'step')} ({self.save_interval_s:.0f} s)"),
            ("planned restart", "none" if planned is None else f"with {counted(planned, 'group')} lost"),
            ("mean time between losses", f"{self.mtbf_s:.0f} s"),
            ("losses endured", f"{self.endurable_failures:.1f}"),
            ("time to train / failure-free", "none" if ratio is None else f"{ratio:.3f}"),
        ]


def prepare() -> None:
    """Import what a choice needs, so that no step waits for it."""
    import_module("spare_megatron.planning.choose")


def at_start(measured: Measured) -> Choice:
    """The choice for these figures; ConfigError when no redundancy makes progress or a figure is impossible."""
    mtbf_s, source = _mtbf_s(measured)
    choice = _choice(measured, mtbf_s, source)
    return _with_the_next(measured, choice)


def _with_the_next(measured: Measured, choice: Choice) -> Choice:
    """The choice with the redundancy of the next start, where it is free, a different one and makes progress."""
    if not measured.redundancy_is_free or measured.redundancy is None:
        return choice
    try:
        free = _choice(replace(measured, redundancy=None), *_mtbf_s(measured))
    except ConfigError:
        return choice
    if free.redundancy == choice.redundancy:
        return choice
    later = f"the next start of the job takes redundancy {free.redundancy}, which cannot change while processes run"
    return replace(choice, redundancy_next=free.redundancy, reason=f"{choice.reason}; {later}")


def _mtbf_s(measured: Measured) -> tuple[float, str]:
    """The mean time between losses in the whole job, in seconds, and words that say where it is from."""
    hours = LLAMA3_MTBF_GPU_HOURS if measured.mtbf_gpu_hours is None else measured.mtbf_gpu_hours
    if not 0 < hours < inf:
        raise ConfigError(f"--spare-mtbf-gpu-hours is {hours}, but must be a finite number above 0")
    source = "default of 49,152 GPU hours, Llama 3" if measured.mtbf_gpu_hours is None else f"{hours:g} GPU hours"
    return hours * 3600 / (measured.num_groups * measured.group_size), source


def without_progress(measured: Measured, why: str) -> Choice:
    """The choice for a running job for which :func:`at_start` finds no progress; ``why`` is its message.

    Where the save interval is free, it is so long that saves take a tenth of the time.
    """
    step_s = measured.compute_s + measured.reduce_s
    steps, words = _interval(measured, max(1, ceil(9 * measured.save_s / step_s)))
    best = "saves take a tenth of the time" if measured.save_interval_steps is None else words
    reason = f"{why}; {best}"
    kept = Choice(
        redundancy=measured.redundancy or 1,
        save_interval_steps=steps,
        save_interval_s=steps * step_s,
        restart_after_failures=None,
        mtbf_s=_mtbf_s(measured)[0],
        time_to_train_ratio=None,
        endurable_failures=0.0,
        reason=reason,
    )
    return _with_the_next(measured, kept)


def restart_pays(measured: Measured, live: int, steps_left: int) -> bool:
    """Whether a restart with all groups costs less time than running the steps left on ``live`` groups would add."""
    slower_s = measured.compute_s * (measured.num_groups / live - 1)
    return steps_left * slower_s > measured.restart_s + measured.save_s


def _interval(measured: Measured, best_steps: int) -> tuple[int, str]:
    """The number of steps between saves that the job uses, and the words for it."""
    best = _at_least_a_write(measured, best_steps)
    given = measured.save_interval_steps
    if given is None:
        return best, f"a save every {counted(best, 'step')}"
    better = f" ({best} would be best)" if best != given else ""
    return given, f"a save every {counted(given, 'step')} as given{better}"


def _at_least_a_write(measured: Measured, steps: int) -> int:
    return max(steps, ceil(measured.write_s / (measured.compute_s + measured.reduce_s)))


def updated_interval(
    measured: Measured, choice: Choice, losses: int, elapsed_s: float, present_steps: int | None = None
) -> Choice | None:
    """The choice made at the start, with a save interval for the ``losses`` seen in ``elapsed_s`` seconds.

    None where that interval hardly differs from ``present_steps`` (default: that of the choice). The loss rate is the
    mean of a gamma posterior whose prior is worth ``PRIOR_LOSSES`` losses at the rate assumed first; the redundancy
    stays.
    """
    present = present_steps or choice.save_interval_steps
    mtbf_s = (elapsed_s + PRIOR_LOSSES * choice.mtbf_s) / (losses + PRIOR_LOSSES)
    source = f"{counted(losses, 'loss', 'losses')} in {elapsed_s:.0f} s"
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
        f"save interval {present} -> {counted(steps, 'step')}: after {source} one every {mtbf_s:.0f} s is expected, "
        f"{choice.mtbf_s:.0f} s were assumed (at most a factor {UPDATE_FACTOR_MAX:g} from the first interval)"
    )
    return replace(choice, save_interval_steps=steps, save_interval_s=steps * step_s, reason=reason)


def _choice(measured: Measured, mtbf_s: float, source: str) -> Choice:
    if measured.num_groups == 1 or measured.redundancy == 1:
        return _unmasked(measured, mtbf_s, source)
    from spare_megatron.planning.choose import candidate, choose  # needs scipy

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
        # more than there are groups: a plan has no use for them, and takes none
        standby_groups=min(measured.standby_groups, measured.num_groups),
        adopt_s=measured.adopt_s,
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
            f"--spare-redundancy {chosen.redundancy} endures {chosen.endurable_failures:.1f} losses, with one every "
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
    """The choice for redundancy 1: no loss can be masked, each is a restart, and only the save interval is chosen."""
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
    return Choice(
        redundancy=1,
        save_interval_steps=steps,
        save_interval_s=steps * step_s,
        restart_after_failures=None,
        mtbf_s=mtbf_s,
        time_to_train_ratio=1 / available,
        endurable_failures=0.0,
        reason=reason,
    )
