"""What a running job asks: redundancy and save interval from its own first figures, and later from its losses.

Called by whoever has measured; nothing here measures. A choice comes with its reason and can be journalled as it is.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Literal

from spare_megatron.config.errors import ConfigError
from spare_megatron.theory.published import best_availability, best_interval_s
from spare_megatron.tuner.choose import candidate, choose
from spare_megatron.tuner.cluster import LLAMA3_MTBF_GPU_HOURS, Cluster

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
    """Given outright: kept."""
    planned_restarts: bool = False
    """Whether the job carries out planned restarts; without them saves must cover every wipe-out."""


@dataclass(frozen=True)
class Choice:
    """What the job uses, and why."""

    redundancy: int
    save_interval_steps: int
    save_interval_s: float
    restart_after_failures: int | None
    mtbf_s: float
    """Of the whole job, as assumed."""
    time_to_train_ratio: float
    endurable_failures: float
    reason: str

    def as_json(self) -> dict[str, object]:
        """For the journal and a checkpoint's metadata."""
        return asdict(self)

    def rows(self) -> list[tuple[str, str]]:
        """A small table for people."""
        planned = self.restart_after_failures
        return [
            ("redundancy", str(self.redundancy)),
            ("save interval", f"{self.save_interval_steps} steps ({self.save_interval_s:.0f} s)"),
            ("planned restart", "none" if planned is None else f"after {planned} losses"),
            ("mean time between losses", f"{self.mtbf_s:.0f} s"),
            ("losses endured", f"{self.endurable_failures:.1f}"),
            ("time to train / failure-free", f"{self.time_to_train_ratio:.3f}"),
        ]


def at_start(measured: Measured) -> Choice:
    """The choice for these figures; ConfigError when no redundancy makes progress or a figure is impossible."""
    hours = LLAMA3_MTBF_GPU_HOURS if measured.mtbf_gpu_hours is None else measured.mtbf_gpu_hours
    if not hours > 0:
        raise ConfigError(f"--spare-mtbf-gpu-hours is {hours}, but must be more than 0")
    source = "default of 49,152 GPU hours, Llama 3" if measured.mtbf_gpu_hours is None else f"{hours:g} GPU hours"
    return _choice(measured, hours * 3600 / (measured.num_groups * measured.group_size), source)


def updated_interval(measured: Measured, choice: Choice, losses: int, elapsed_s: float) -> Choice | None:
    """The choice with the save interval for the losses seen in this time; None where it hardly changes.

    The rate is that of a gamma prior worth ``PRIOR_LOSSES`` losses at the first assumption; the redundancy stays."""
    mtbf_s = (elapsed_s + PRIOR_LOSSES * choice.mtbf_s) / (losses + PRIOR_LOSSES)
    source = f"{losses} losses in {elapsed_s:.0f} s"
    try:
        fresh = _choice(replace(measured, redundancy=choice.redundancy), mtbf_s, source)
        wanted = float(fresh.save_interval_steps)
    except ConfigError:
        wanted = 1.0
    low = choice.save_interval_steps / UPDATE_FACTOR_MAX
    steps = max(1, round(min(max(wanted, low), choice.save_interval_steps * UPDATE_FACTOR_MAX)))
    if abs(steps - choice.save_interval_steps) < max(1.0, UPDATE_CHANGE_MIN * choice.save_interval_steps):
        return None
    step_s = choice.save_interval_s / choice.save_interval_steps
    reason = (
        f"save interval {choice.save_interval_steps} -> {steps} steps: {source} make one every {mtbf_s:.0f} s, "
        f"{choice.mtbf_s:.0f} s were assumed (at most a factor {UPDATE_FACTOR_MAX:g} from the start's)"
    )
    return replace(choice, save_interval_steps=steps, save_interval_s=steps * step_s, reason=reason)


def _choice(measured: Measured, mtbf_s: float, source: str) -> Choice:
    if measured.num_groups == 1 or measured.redundancy == 1:
        return _unmasked(measured, mtbf_s, source)
    cluster = Cluster(
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
        reason = "redundancy as given"
    else:
        plan = choose(cluster)
        chosen, reason = plan.chosen, plan.reason
    found = chosen.outcome
    if found is None:
        raise ConfigError(
            f"--spare-redundancy {chosen.redundancy} endures {chosen.endurable_failures:.1f} losses, one every "
            f"{mtbf_s:.0f} s ({source}): too few for a restart of {measured.restart_s:g} s; use a larger one or 'auto'"
        )
    return Choice(
        redundancy=chosen.redundancy,
        save_interval_steps=found.interval_steps,
        save_interval_s=found.interval_s,
        restart_after_failures=found.restart_after,
        mtbf_s=mtbf_s,
        time_to_train_ratio=found.ratio,
        endurable_failures=chosen.endurable_failures,
        reason=f"{reason}; a loss every {mtbf_s:.0f} s ({source}), a save every {found.interval_steps} steps",
    )


def _unmasked(measured: Measured, mtbf_s: float, source: str) -> Choice:
    """No loss can be masked: every one is a restart, and only the interval is chosen."""
    step_s = measured.compute_s + measured.reduce_s
    interval_s = max(step_s, best_interval_s(mtbf_s, measured.restart_s, measured.save_s))
    steps = max(1, round(interval_s / step_s))
    available = best_availability(mtbf_s, measured.restart_s, measured.save_s)
    if available <= 0:
        raise ConfigError(
            f"a loss every {mtbf_s:.0f} s ({source}) leaves no progress between restarts of {measured.restart_s:g} s; "
            "use more groups and --spare-redundancy 2 or more"
        )
    reason = (
        f"one host per shard: every loss, one every {mtbf_s:.0f} s ({source}), is a restart; a save every {steps} steps"
    )
    return Choice(1, steps, steps * step_s, None, mtbf_s, 1 / available, 0.0, reason)
