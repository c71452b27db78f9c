"""What spare-plan would choose for a job from what was observed of it. Pure."""

from __future__ import annotations

from statistics import mean

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.plural import counted
from spare_megatron.monitor.job_picture import FailureCost, JobPicture
from spare_megatron.monitor.wall_time import WallTime
from spare_megatron.planning.at_start import Choice, Measured, at_start

LOSSES_MIN = 3
"""With fewer, the mean time between losses is known only within an order of magnitude."""


def observed_choice(picture: JobPicture, wall_time: WallTime, costs: list[FailureCost]) -> Choice:
    """The choice for the figures of this job: its losses, restarts, saves, computing and returns.

    Raises:
        ConfigError: why there is none: too little was observed, or no redundancy makes progress.
    """
    history, usual, job = picture.history, picture.usual, picture.job
    losses = sum(len(cost.failure.groups) for cost in costs)
    if not usual.compute_s:
        raise ConfigError("no failure-free step was observed")
    if losses < LOSSES_MIN:
        raise ConfigError(
            f"{counted(losses, 'loss', 'losses')} in {wall_time.wall_s:.0f} s are too few to know how often they come; "
            f"{LOSSES_MIN} would do"
        )
    spec = history.job_attempt.spec
    group_size = max(1, job.world_size // spec.num_groups)
    mtbf_s = wall_time.wall_s / losses
    restarts_s = [cost["restart"] for cost in wall_time.job_attempts.values() if "restart" in cost]
    starts = max(1, len(history.job_attempts) - len(restarts_s))
    back_s = [seconds for cost in costs for seconds in cost.back_s.values()]
    saves = max(1, len(history.saves))
    return at_start(
        Measured(
            num_groups=spec.num_groups,
            group_size=group_size,
            restart_s=round(mean(restarts_s) if restarts_s else wall_time.parts["start"] / starts, 3),
            save_s=round(wall_time.parts["save"] / saves, 6),
            compute_s=round(usual.compute_s, 6),
            reduce_s=round(usual.reduce_s + usual.rest_s, 6),
            pieces_per_shard=spec.pieces_per_shard,
            steps=max(1, spec.last_step),
            mtbf_gpu_hours=mtbf_s * spec.num_groups * group_size / 3600,
            granularity="shard" if spec.granularity == "shard" else "microbatch",
            planned_restarts=True,
            data="shared" if job.tuning.shared_data else "staged",
            rejoin_s=round(mean(back_s), 3) if back_s else None,
            standby_groups=job.tuning.standby_groups,
            adopt_s=job.tuning.adopt_s,
        )
    )
