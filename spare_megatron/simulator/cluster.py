"""The figures of a simulated cluster and the policy that runs on it, and the validation of both.

Defaults are the published simulation's (arXiv 2603.00357): a job of 10,000 steps on 600,000 GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.injection import Injection
from spare_megatron.planning.cluster_figures import JITTER_MAX

SHAPE_MIN, SHAPE_MAX = 0.1, 20.0
"""Allowed Weibull shapes of failure clocks. Below, a few gaps of enormous length make up the mean (at 0.1 it is 3.6
million times the scale, at 0.005 it overflows); above, all groups fail together."""
FAILURES_MAX = 1_000_000
"""Most failures that may be expected in a failure-free job's time: each is simulated."""
PIECES_MAX = 20_000_000
"""Most pieces of a step, of which each is in an array."""
NODES_MAX = 1_000_000
POLICIES = ("checkpoint", "replication", "spare", "microbatch")


@dataclass(frozen=True)
class Cluster:
    """Times and failures of the machines; all times in seconds."""

    num_groups: int
    mtbf_s: float = 300.0
    """Mean time between failures in the whole cluster while all groups live."""
    weibull_shape: float = 0.78
    """Weibull shape of the time between two failures of one group; 1 is exponential."""
    clocks: str = "group"
    """'group': each group has a failure clock of mean N x ``mtbf_s``; 'system': one clock, which hits a random
    group."""
    compute_s: float = 64.0
    """Time in which a group computes one shard."""
    reduce_s: float = 2.0
    """Time of the reduction over the groups."""
    rebuild_s: float = 0.1
    """Time from a death to new communicators, with the agreement on the epoch."""
    save_s: float = 60.0
    restart_s: float = 3600.0
    rejoin_s: float | None = None
    """Time from a group's death until it could take the state; None where it stays away until the whole job
    restarts."""
    nodes_per_group: int = 0
    """Nodes of a group, of which an interruption takes one out for a repair; 0: groups are what fails and returns."""
    spare_nodes: int = 0
    node_repair_h: float = 24.0
    """Mean time of a node's repair, in hours. ``rejoin_s`` then counts from when a group has all its nodes."""
    node_share: float = 0.7
    """Share of the interruptions that take a node out; after the others the group starts again on its nodes."""
    salvage: bool = True
    """Groups that wait for nodes put theirs together, as under spare-slurm."""
    stages: int = 1
    """Pipeline stages of a group."""
    shapes: tuple[int, ...] = ()
    """Numbers of stages with which a group may come back that misses nodes, the largest first; empty: it waits."""
    layers: int | None = None
    """Of the model, which are divided over the stages; None: each stage has the same part of it."""
    rehost_s: float = 0.0
    """Time from a death until state shards have all their copies again, where groups keep only some."""
    transfer_s: float = 0.0
    """Time in which all donors together give a learner the state; 0: it has it at once, and is not compared."""
    result_s: float = 0.0
    """Time in which they give it the result of one step."""
    donor_share: float = 0.0
    """What serving a learner adds to a donor's computing, as a share of it."""
    jitter: float = 0.05
    """Relative standard deviation of a group's compute time; a step waits for the slowest group."""
    stragglers: int = 0
    """Number of groups, drawn once for a trial, that are slower than the others from the first step to the last."""
    straggler_slowdown: float = 2.0
    """How many times as long a straggler takes for a piece, beside its jitter."""
    domain_mtbf_s: float = 0.0
    """Mean time between failures of one whole domain of the topology; 0 where domains do not fail as a whole."""

    def __post_init__(self) -> None:
        _at_least("--num-groups", self.num_groups, 1)
        for name in ("mtbf_s", "weibull_shape", "compute_s"):
            _positive(_flag(name), getattr(self, name))
        for name in (
            "reduce_s",
            "rebuild_s",
            "save_s",
            "restart_s",
            "jitter",
            "domain_mtbf_s",
            "donor_share",
            "rehost_s",
        ):
            _not_negative(_flag(name), getattr(self, name))
        if self.rejoin_s is not None:
            _not_negative("--rejoin-s", self.rejoin_s)
        for name in ("nodes_per_group", "spare_nodes"):
            _not_negative(_flag(name), getattr(self, name))
        if self.nodes_per_group and self.rejoin_s is None:
            raise ConfigError(
                f"--nodes-per-group {self.nodes_per_group} has no effect without --rejoin-s S, the time in which a "
                "group starts on its nodes; give both"
            )
        _positive("--node-repair-h", self.node_repair_h)
        if not 0 <= self.node_share <= 1:
            raise ConfigError(f"--node-share is {self.node_share:g}, but must be a share from 0 to 1")
        if not SHAPE_MIN <= self.weibull_shape <= SHAPE_MAX:
            raise ConfigError(
                f"--weibull-shape {self.weibull_shape:g} is outside the range of real machines; use {SHAPE_MIN:g} to "
                f"{SHAPE_MAX:g} (0.78 is the published one, 1 is exponential)"
            )
        if not 0 <= self.stragglers < self.num_groups:
            raise ConfigError(
                f"--stragglers {self.stragglers} must lie in 0..{self.num_groups - 1}, as there are {self.num_groups} "
                "groups and one must be as fast as usual"
            )
        _finite("--straggler-slowdown", self.straggler_slowdown)
        if self.straggler_slowdown < 1:
            raise ConfigError(
                f"--straggler-slowdown is {self.straggler_slowdown:g}, but must be at least 1 (2: twice as long)"
            )
        if self.jitter >= JITTER_MAX:
            raise ConfigError(
                f"--jitter {self.jitter:g} makes steps of negative length possible; use less than {JITTER_MAX:g} "
                "(0.05 is usual)"
            )
        _one_of("--clocks", self.clocks, ("group", "system"))
        nodes = self.num_groups * self.nodes_per_group + self.spare_nodes
        if nodes > NODES_MAX:
            raise ConfigError(
                f"--num-groups {self.num_groups} x --nodes-per-group {self.nodes_per_group} + --spare-nodes "
                f"{self.spare_nodes} are {nodes} nodes, but at most {NODES_MAX} are simulated; use fewer"
            )

    @property
    def away_s(self) -> float | None:
        """Mean time until a lost group could take the state, where nothing is spare; None: it stays away."""
        if self.rejoin_s is None or not self.nodes_per_group:
            return self.rejoin_s
        return self.rejoin_s + self.node_share * 3600 * self.node_repair_h


@dataclass(frozen=True)
class Reading:
    """Assumptions about the published simulation where its paper does not state them.

    ``benchmarks/reproduce_spare.py --sensitivity`` changes them one by one. The defaults are those that reproduce the
    published figures.
    """

    restart_repeats: bool = True
    """A group that fails while the job restarts begins its own restart anew; False: it ignores such failures."""
    clocks_restart: bool = False
    """Failure clocks are reset when the job has restarted."""
    masked_layers: int = 0
    """Layers of computing that every masked failure costs beyond its patch."""
    replication_rebuilds: bool = False
    """With replication, a step with a masked failure costs the rebuild of the communicators; False: it costs nothing,
    as published. ``spare-simulate --rebuild-s`` sets it."""
    blocks: bool = True
    """Replicas of a shard are blocks of consecutive groups; False: shard i is on groups i .. i + r - 1, cyclically."""
    patch_jitter: bool = False
    """A patch waits for the slowest of all groups, as a step does."""
    replans_at_once: bool = True
    """SPARe makes a new plan at once for a death that is seen before a layer, and the remaining layers follow it
    without a patch; False: every death is handled at the reduction, with a patch where a shard is missing."""
    patch_work: float = 0.07
    """Mean patch of the published scheme, in shards per step, in the formula of its save interval. It is fitted: with
    this value the formula gives the published save intervals, 15, 23 and 30 steps."""


@dataclass(frozen=True)
class Policy:
    """How the job is set up against failures, and what the simulation does with it."""

    name: str = "microbatch"
    """One of ``POLICIES``; 'spare' is the published scheme, 'microbatch' ours."""
    redundancy: int = 8
    pieces_per_shard: int = 16
    state_redundancy: int | None = None
    """Copies of each part of the optimizer's state; None: every group has all of it."""
    exact_share: float = 0.0
    """What exact sums add to the computing of every piece, as a share of it. The failure-free run has none."""
    placement: str = "independent"
    steps: int = 10_000
    save_interval_s: float | None = None
    """Seconds between two saves; None takes the optimum of the published formula."""
    restart_after: int | None = None
    """Number of losses after which a planned restart brings all groups back; None means never."""
    standby_groups: int = 0
    balance: bool = False
    """Slow groups give pieces to faster ones during a step, as a model has it."""
    relief: bool = False
    """The same, as the protocol machine decides it in each step."""
    async_save: bool = False
    """A save does not stop the training."""
    adopt_s: float | None = None
    """Seconds in which groups open a shard that has lost its last host, and that they adopt; None: they do not, and the
    job restarts from the checkpoint."""
    reading: Reading = Reading()
    """Assumptions about the published policies."""
    injections: tuple[Injection, ...] = ()
    """Scripted deaths, each at a named moment of a named step."""

    def check(self, cluster: Cluster) -> None:
        """Raise ConfigError when this policy cannot run on ``cluster``."""
        _one_of("--policy", self.name, POLICIES)
        _one_of("--placement", self.placement, ("independent", "consecutive"))
        _at_least("--redundancy", self.redundancy, 1)
        _at_least("--pieces-per-shard", self.pieces_per_shard, 1)
        _not_negative("--exact-cost", self.exact_share)
        _at_least("--steps", self.steps, 1)
        _not_negative("--standby-groups", self.standby_groups)
        self._check_size(cluster)
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
                    "would only save; use a longer interval or --async-save"
                )
        if self.standby_groups and cluster.nodes_per_group:
            raise ConfigError(
                f"--standby-groups {self.standby_groups} and --nodes-per-group {cluster.nodes_per_group} do not go "
                "together: a launcher has standbys or spare nodes; leave one of them out"
            )
        if self.adopt_s is not None:
            _not_negative("--adopt-s", self.adopt_s)
        if self.state_redundancy is not None:
            self._check_state_copies(cluster)
        if self.balance and self.relief:
            raise ConfigError(
                "--balance is a model of what --relief decides in each step, so only one of them can be given; use "
                "--balance for jobs of many steps"
            )
        if self.restart_after is not None and not 1 <= self.restart_after < cluster.num_groups:
            raise ConfigError(
                f"--restart-after {self.restart_after} must lie in 1..{cluster.num_groups - 1}, as there are "
                f"{cluster.num_groups} groups"
            )
        if self.name != "microbatch":
            self._check_published(cluster)

    def _check_size(self, cluster: Cluster) -> None:
        """Refuse what would be simulated for hours, or would not fit into memory."""
        if cluster.num_groups * self.pieces_per_shard > PIECES_MAX:
            raise ConfigError(
                f"--num-groups {cluster.num_groups} with {self.pieces_per_shard} pieces of a shard are "
                f"{cluster.num_groups * self.pieces_per_shard} pieces of a step, but at most {PIECES_MAX} are "
                f"simulated; use shards of at most {PIECES_MAX // cluster.num_groups}"
            )

    def check_failures(self, cluster: Cluster) -> None:
        """Raise ConfigError where more failures would be drawn than a simulation can have."""
        job_s = self.steps * (cluster.compute_s + cluster.reduce_s)
        for flag, mtbf_s in (("--mtbf-s", cluster.mtbf_s), ("--domain-mtbf-s", cluster.domain_mtbf_s)):
            if mtbf_s and job_s > FAILURES_MAX * mtbf_s:
                raise ConfigError(
                    f"{flag} {mtbf_s:g} means {job_s / mtbf_s:.3g} failures in the {job_s:.3g} s of --steps "
                    f"{self.steps}, but at most {FAILURES_MAX} are simulated; use fewer --steps or {flag} "
                    f"{job_s / FAILURES_MAX:.3g} or more"
                )

    def _check_state_copies(self, cluster: Cluster) -> None:
        copies, groups = self.state_redundancy or 0, cluster.num_groups
        if not 1 <= copies < groups:
            raise ConfigError(
                f"--state-redundancy {copies} must lie in 1..{groups - 1}, as there are {groups} groups; without it "
                "every group has the whole state"
            )
        without = {
            "--state-gib": cluster.transfer_s > 0,
            "--spare-shapes": bool(cluster.shapes),
            "--standby-groups": self.standby_groups > 0,
        }
        for flag, is_given in without.items():
            if is_given:
                raise ConfigError(
                    f"{flag} is not simulated with --state-redundancy {copies}, where groups that come back gather the "
                    "weights from all others; leave one of them out"
                )

    def _check_published(self, cluster: Cluster) -> None:
        ours = {
            "--rejoin-s": cluster.rejoin_s is not None,
            "--state-gib": cluster.transfer_s > 0,
            "--state-redundancy": self.state_redundancy is not None,
            "--nodes-per-group": cluster.nodes_per_group > 0,
            "--standby-groups": self.standby_groups > 0,
            "--restart-after": self.restart_after is not None,
            "--balance": self.balance,
            "--relief": self.relief,
            "--adopt-s": self.adopt_s is not None,
            "--inject": bool(self.injections),
        }
        if self.name == "replication":
            # Its dead groups may return: a comparison that the blocks of replication allow.
            del ours["--rejoin-s"]
        given = [flag for flag, is_given in ours.items() if is_given]
        if given:
            raise ConfigError(
                f"{given[0]} is only for --policy microbatch, but the policy is {self.name}; leave it out"
            )


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
