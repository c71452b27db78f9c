"""The figures of a cluster and a job from which a plan is made, and their checks."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import isfinite
from typing import Literal

from spare_megatron.config.errors import ConfigError

LLAMA3_MTBF_GPU_HOURS = 49_152.0
"""GPU hours between unexpected interruptions: 16,384 GPUs, one per about 3 h (Llama 3, arXiv 2407.21783, ch. 3.3.4)."""

WEIBULL_SHAPES = (0.1, 20.0)
"""Smallest and largest Weibull shape of failure clocks: clusters show 0.5 to 1.5; far outside, Gamma(1 + 2 / shape)
overflows or all groups fail at the same time."""
JITTER_MAX = 0.3
"""Relative standard deviation of a step's time from which steps of negative length would be drawn now and then."""
_MAY_BE_ZERO = (
    *("restart_s", "save_s", "reduce_s", "rebuild_s", "jitter", "data_gib", "rejoin_s", "standby_groups"),
    *("transfer_s", "result_s", "adopt_s", "standby_price"),
)


@dataclass(frozen=True)
class ClusterFigures:
    """The figures, under the names of spare-plan's flags; times are in seconds. ConfigError for an impossible one."""

    gpus: int
    gpus_per_group: int
    """M, which includes the inner data parallelism of the group."""
    mtbf_s: float
    """Mean time between losses anywhere in the cluster."""
    restart_s: float
    save_s: float
    compute_s: float
    """Time in which a group computes one shard."""
    reduce_s: float
    rebuild_s: float = 0.1
    weibull_shape: float = 1.0
    pieces_per_shard: int = 16
    rejoin_s: float | None = None
    """Time from a loss until the group could take the state of the others."""
    transfer_s: float = 0.0
    """Time in which its donors give it the state; 0: at once."""
    result_s: float = 0.0
    """Time in which they give it the result of one step."""
    standby_groups: int = 0
    """Started groups beyond ``gpus``."""
    standby_price: float = 1.0
    """What an idle GPU of a standby group costs, as a share of one that trains; 0: nothing."""
    adopt_s: float | None = None
    """Time in which groups open a shard that has lost its last host and that they adopt, staging not included; None:
    they do not, and the job restarts from the checkpoint."""
    save_interval_s: float | None = None
    """Time between two saves; None: the best."""
    granularity: Literal["microbatch", "shard"] = "microbatch"
    data: Literal["shared", "staged"] = "staged"
    jitter: float = 0.05
    steps: int = 10_000
    planned_restarts: bool = True
    """Whether the job can restart with all groups, of its own accord, after some losses."""
    data_gib: float = 0.0
    """All training data; with staged data every group holds r / N of it."""
    stage_gib_per_s: float = 1.0
    """GiB per second at which one group stages its data."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None or isinstance(value, str | bool):
                continue
            flag = "--" + field.name.replace("_", "-")
            if not isfinite(value):
                raise ConfigError(f"{flag} is {value}, but must be a finite number")
            if value < 0 or (value == 0 and field.name not in _MAY_BE_ZERO):
                least = "at least 0" if field.name in _MAY_BE_ZERO else "more than 0"
                raise ConfigError(f"{flag} is {value}, but must be {least}")
        if self.gpus % self.gpus_per_group:
            low = self.gpus // self.gpus_per_group * self.gpus_per_group
            raise ConfigError(
                f"--gpus {self.gpus} is not divisible by --gpus-per-group {self.gpus_per_group}; use --gpus "
                f"{low or self.gpus_per_group}"
            )
        low_shape, high_shape = WEIBULL_SHAPES
        if not low_shape <= self.weibull_shape <= high_shape:
            raise ConfigError(
                f"--weibull-shape is {self.weibull_shape:g}, but must be {low_shape:g} to {high_shape:g}; "
                "failure clocks of clusters show 0.5 to 1.5"
            )
        if self.jitter >= JITTER_MAX:
            raise ConfigError(
                f"--jitter {self.jitter:g} makes steps of negative length possible; use less than {JITTER_MAX:g} "
                "(0.05 is usual)"
            )
        if self.num_groups < 2:
            raise ConfigError(
                f"--gpus {self.gpus} with --gpus-per-group {self.gpus_per_group} is one group, which can mask no loss; "
                f"use at least {2 * self.gpus_per_group} GPUs or --gpus-per-group {max(1, self.gpus // 2)}"
            )
        if self.standby_groups > self.num_groups:
            raise ConfigError(
                f"--standby-groups {self.standby_groups} are more than the {self.num_groups} groups that train; use "
                f"at most {self.num_groups}"
            )
        if self.data == "shared" and self.data_gib > 0:
            raise ConfigError(
                f"--data-gib {self.data_gib:g} says what is staged, but with --data shared nothing is; leave it out "
                "or use --data staged"
            )

    @property
    def num_groups(self) -> int:
        """N: number of groups that train."""
        return self.gpus // self.gpus_per_group

    def stage_s(self, redundancy: int) -> float:
        """Seconds in which a group that comes back stages its r / N of the data; 0 with shared data."""
        if self.data == "shared":
            return 0.0
        return redundancy * self.data_gib / self.num_groups / self.stage_gib_per_s
