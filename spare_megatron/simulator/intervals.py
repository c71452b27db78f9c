"""Computes the save interval of a simulation where none is given: the published optimum (planning.published)."""

from __future__ import annotations

from math import inf

from spare_megatron.planning.published import best_interval_s, endurable_failures, mean_depth
from spare_megatron.simulator.cluster import Cluster, Policy


def save_interval_s(cluster: Cluster, policy: Policy) -> float:
    """Seconds between two saves; infinite where a save could never be needed."""
    if policy.save_interval_s is not None:
        return policy.save_interval_s
    save_s = 0.0 if policy.async_save else cluster.save_s
    time_s = time_to_wipe_out_s(cluster, policy)
    if time_s == inf:
        return inf
    # Asynchronous saves stop no training, but one must end before the next begins.
    return max(best_interval_s(time_s, cluster.restart_s, save_s), cluster.save_s)


def save_interval_steps(cluster: Cluster, policy: Policy) -> int:
    """The save interval in steps, without jitter and reduction, as the published simulation counts: 6/8/10 and
    15/23/30. Where a save could never be needed it is the length of the job."""
    layers = 1.0
    if policy.name == "replication":
        layers = policy.redundancy
    elif policy.name == "spare":
        layers = mean_depth(cluster.num_groups, policy.redundancy, lambda lost: policy.reading.patch_work)
    interval_s = save_interval_s(cluster, policy)
    return policy.steps if interval_s == inf else max(1, int(interval_s / (cluster.compute_s * layers)))


def time_to_wipe_out_s(cluster: Cluster, policy: Policy) -> float:
    """Mean seconds until a shard has no host; infinite where a planned restart comes before.

    With re-join the r hosts of a shard are down together about every 1 / (N r a (a T)^(r - 1)) seconds, where a is the
    failure rate of one group and T its time of repair; but not more often than without re-join.
    """
    groups, redundancy = cluster.num_groups, policy.redundancy
    if policy.name == "checkpoint":
        return cluster.mtbf_s
    if policy.restart_after is not None and redundancy > policy.restart_after:
        return inf
    endured_s = endurable_failures(groups, redundancy) * cluster.mtbf_s
    if redundancy == groups:
        endured_s = _all_lost_s(cluster)
    if cluster.away_s is None:
        return endured_s
    each = 1 / (groups * cluster.mtbf_s)
    down = min(1.0, each * cluster.away_s)
    # 0 where groups return at once, or where the power is below the smallest float.
    rate = groups * redundancy * each * down ** (redundancy - 1)
    return max(endured_s, 1 / rate) if rate > 0 else inf


def _all_lost_s(cluster: Cluster) -> float:
    """Mean seconds until the last of N groups is lost: N m (1 + 1/2 + ... + 1/N) for exponential clocks of mean N m.
    The published formula, which is for large N / r, gives less than half of it (N > 1)."""
    return cluster.num_groups * cluster.mtbf_s * sum(1 / n for n in range(1, cluster.num_groups + 1))
