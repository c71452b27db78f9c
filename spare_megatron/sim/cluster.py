"""What is simulated: the figures of a cluster, and the policy that runs on it. Validation of both is here.

Defaults are the published simulation's (arXiv 2603.00357): a job of 10,000 steps on 600,000 GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.injection import Injection

SHAPE_MIN, SHAPE_MAX = 0.1, 20.0
"""Of Weibull clocks. Below, the mean is made of a few gaps of astronomical length (at 0.1 it is 3.6 million times the
scale, at 0.005 no number); above, all groups fail together."""
POLICIES = ("checkpoint", "replication", "spare", "microbatch")


@dataclass(frozen=True)
class Cluster:
    """Times and failures of the machines; all times in seconds."""

    num_groups: int
    mtbf_s: float = 300.0
    """Mean time between failures of the whole cluster, all groups live."""
    weibull_shape: float = 0.78
    """Of the time between two failures of one group; 1 is exponential."""
    clocks: str = "group"
    """'group': a failure clock per group, mean N x ``mtbf_s``; 'system': one clock, and a group drawn at each ring."""
    compute_s: float = 64.0
    """One shard on one group."""
    reduce_s: float = 2.0
    """Reduction over the groups."""
    rebuild_s: float = 0.1
    """From a death to new communicators, agreement included."""
    save_s: float = 60.0
    restart_s: float = 3600.0
    rejoin_s: float | None = None
    """From a group's death to its return; None: it stays away until the whole job restarts."""
    jitter: float = 0.05
    """Standard deviation of a group's step time, relative; a step ends at the slowest group."""
    domain_mtbf_s: float = 0.0
    """Mean time between failures of one whole domain of the topology; 0: domains do not fail as a whole."""

    def __post_init__(self) -> None:
        _at_least("--num-groups", self.num_groups, 1)
        for name in ("mtbf_s", "weibull_shape", "compute_s"):
            _positive(_flag(name), getattr(self, name))
        for name in ("reduce_s", "rebuild_s", "save_s", "restart_s", "jitter", "domain_mtbf_s"):
            _not_negative(_flag(name), getattr(self, name))
        if self.rejoin_s is not None:
            _not_negative("--rejoin-s", self.rejoin_s)
        if not SHAPE_MIN <= self.weibull_shape <= SHAPE_MAX:
            raise ConfigError(
                f"--weibull-shape {self.weibull_shape:g} is no shape that machines have; use {SHAPE_MIN:g} to "
                f"{SHAPE_MAX:g} (0.78 is the published one, 1 exponential)"
            )
        if self.jitter >= 0.3:
            raise ConfigError(
                f"--jitter {self.jitter:g} makes steps of negative length possible; use less than 0.3 (0.05 is usual)"
            )
        _one_of("--clocks", self.clocks, ("group", "system"))


@dataclass(frozen=True)
class Reading:
    """How the published simulation is read where its paper is silent; each field is one assumption that
    ``benchmarks/reproduce_spare.py --sensitivity`` turns around."""

    restart_repeats: bool = True
    """A group that fails while the job restarts starts its own restart anew; False: failures then change nothing."""
    clocks_restart: bool = False
    """Failure clocks start new when the job has restarted."""
    masked_layers: int = 0
    """Layers that every masked failure costs beyond its patch."""
    replication_rebuilds: bool = False
    """A step with a masked failure costs replication the rebuild of the communicators too; published: nothing. Turned
    around by ``spare-simulate --rebuild-s``."""
    blocks: bool = True
    """Replicas of a shard are blocks of consecutive groups; False: shard i on groups i .. i + r - 1, cyclic."""
    patch_jitter: bool = False
    """A patch waits for the slowest of all groups, as a step does."""
    replans_at_once: bool = True
    """SPARe plans for a death that is seen before a layer at once, and the layers still to come follow the new order
    without a patch; False: every death waits for the reduction, and a patch where a shard is missing."""
    patch_work: float = 0.07
    """Mean patch of the published scheme, in shards per step, in the formula of its save interval. Fitted: with this
    value the formula gives the published save intervals, 15, 23 and 30 steps."""


@dataclass(frozen=True)
class Policy:
    """How the job meets failures."""

    name: str = "microbatch"
    """One of ``POLICIES``; 'spare' is the published scheme, 'microbatch' ours."""
    redundancy: int = 8
    pieces_per_shard: int = 16
    placement: str = "independent"
    steps: int = 10_000
    save_interval_s: float | None = None
    """None: the optimum of the published formula."""
    restart_after: int | None = None
    """A planned restart, all groups back, after so many losses; None: never."""
    standby_groups: int = 0
    balance: bool = False
    """Slow groups give pieces up inside a step."""
    async_save: bool = False
    """A save does not stop the training."""
    soft_wipe_out_s: float | None = None
    """After a wipe-out survivors go on under a new placement, data staged again in this time; None: restart."""
    reading: Reading = Reading()
    """Of the published policies."""
    injections: tuple[Injection, ...] = ()
    """Deaths at named moments of named steps."""

    def check(self, cluster: Cluster) -> None:
        """Raises ConfigError when it cannot run there."""
        _one_of("--policy", self.name, POLICIES)
        _one_of("--placement", self.placement, ("independent", "consecutive"))
        _at_least("--redundancy", self.redundancy, 1)
        _at_least("--pieces-per-shard", self.pieces_per_shard, 1)
        _at_least("--steps", self.steps, 1)
        _not_negative("--standby-groups", self.standby_groups)
        if self.redundancy > cluster.num_groups:
            raise ConfigError(
                f"--redundancy {self.redundancy} is larger than --num-groups {cluster.num_groups}: a shard cannot have "
                f"more hosts than there are groups; use {cluster.num_groups} or less"
            )
        if self.save_interval_s is not None:
            _positive("--save-interval-s", self.save_interval_s)
            if self.save_interval_s <= cluster.save_s and not self.async_save:
                raise ConfigError(
                    f"--save-interval-s {self.save_interval_s:g} is not above --save-s {cluster.save_s:g}: the job "
                    "would do nothing but save; use a longer interval or --async-save"
                )
        if self.soft_wipe_out_s is not None:
            _not_negative("--soft-wipe-out-s", self.soft_wipe_out_s)
        if self.restart_after is not None and not 1 <= self.restart_after < cluster.num_groups:
            raise ConfigError(
                f"--restart-after {self.restart_after} must lie in 1..{cluster.num_groups - 1}, as there are "
                f"{cluster.num_groups} groups"
            )
        if self.name != "microbatch":
            self._check_published(cluster)

    def _check_published(self, cluster: Cluster) -> None:
        ours = {
            "--rejoin-s": cluster.rejoin_s is not None,
            "--standby-groups": self.standby_groups > 0,
            "--restart-after": self.restart_after is not None,
            "--balance": self.balance,
            "--soft-wipe-out-s": self.soft_wipe_out_s is not None,
            "--inject": bool(self.injections),
        }
        given = [flag for flag, is_given in ours.items() if is_given]
        # Replication whose dead groups return is a comparison that the blocks of replication allow.
        if self.name == "replication" and given == ["--rejoin-s"]:
            return
        if given:
            raise ConfigError(f"{given[0]} belongs to --policy microbatch, the policy is {self.name}; leave it out")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _finite(flag: str, value: float) -> None:
    if not isfinite(value):
        raise ConfigError(f"{flag} is {value}; give a finite number")


def _positive(flag: str, value: float) -> None:
    _finite(flag, value)
    if value <= 0:
        raise ConfigError(f"{flag} is {value:g}, but must be above 0")


def _not_negative(flag: str, value: float) -> None:
    _finite(flag, value)
    if value < 0:
        raise ConfigError(f"{flag} is {value:g}, but must not be negative")


def _at_least(flag: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"{flag} is {value}, but must be at least {least}")


def _one_of(flag: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{flag} {value} is unknown; use {', '.join(allowed)}")
