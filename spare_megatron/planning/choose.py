"""Chooses redundancy, planned restart and save interval of least time to train, and says why others take longer.

In microbatch granularity redundancy costs no computing. With shared data every group reads every shard (r = N), and
only the planned restart is to be chosen. With staged data r costs disk space of each group and the time to stage; so of
the candidates within ``TIE`` of the best, the one with the smallest r is chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from math import inf

import numpy as np

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.plural import counted
from spare_megatron.placement import build_placement
from spare_megatron.placement.overlap import overlap_bound
from spare_megatron.placement.rulers import absent
from spare_megatron.planning import depth, endured, ratio, rejoin
from spare_megatron.planning.bare_shards import Rescue
from spare_megatron.planning.catching_up import RESULTS_KEPT, mean_commits_to_admission, without_a_share_s
from spare_megatron.planning.cluster_figures import ClusterFigures

TIE = 0.005
"""Candidates whose times to train differ by at most this share count as equal."""
REDUNDANCY_MAX = 20
"""Largest r among the candidates, besides N for shared data and a given redundancy."""
MTBF_S_MAX = 1e12
"""Longest mean time between losses that is tried for the advice to a cluster without progress, seconds."""
SHARD_PATCHES = 0.1
"""Share of losses for which shard granularity computes a patch: those where a survivor has not computed the lost
group's shards already in this step."""


@dataclass(frozen=True)
class Candidate:
    """A redundancy and the expected course of a job with it."""

    redundancy: int
    granularity: str
    endurable_failures: float
    """Mean number of losses before the one that takes a shard's last host."""
    mean_work: float
    """Load of the most loaded survivor in shards, mean over the states before that loss."""
    mean_work_until_restart: float
    """The same mean over the states before the planned restart; ``mean_work`` where there is none."""
    stage_gib_per_group: float
    stage_s: float
    outcome: ratio.ExpectedRun | None
    """None where the job would make no progress."""
    method: str
    """How endurable_failures was computed."""

    def as_json(self) -> dict[str, object]:
        """The fields under the names of spare-plan --json."""
        found = self.outcome
        return {
            "redundancy": self.redundancy,
            "granularity": self.granularity,
            "save_interval_s": _round(found.interval_s) if found else None,
            "save_interval_steps": found.interval_steps if found else None,
            "time_to_train_ratio": _round(found.ratio) if found else None,
            "availability": _round(found.availability) if found else None,
            "mean_work": _round(self.mean_work),
            "mean_work_until_restart": _round(self.mean_work_until_restart),
            "endurable_failures": _round(self.endurable_failures),
            "restart_after_failures": found.restart_after if found else None,
            "stage_gib_per_group": _round(self.stage_gib_per_group),
            "method": self.method,
        }


@dataclass(frozen=True)
class RedundancyPlan:
    """The chosen candidate, and a sentence that says why."""

    chosen: Candidate
    candidates: tuple[Candidate, ...]
    """All, in order of r."""
    allowed: tuple[Candidate, ...]
    """Those that could be chosen and make progress, in order of r."""
    reason: str


def choose(cluster: ClusterFigures, redundancy: int | None = None, longest: float | None = None) -> RedundancyPlan:
    """The best plan for a cluster; a given ``redundancy`` is kept. ``longest``: the longest time to train, over the
    failure-free one, that counts as equal to the best; None: ``TIE`` more than the best.

    ConfigError when no allowed redundancy makes progress, or the given one is not in 1..N.
    """
    num_groups = cluster.num_groups
    check_transfer(cluster)
    if redundancy is not None and not 1 <= redundancy <= num_groups:
        raise ConfigError(
            f"--redundancy {redundancy} is not in 1..{num_groups}, the number of groups; use --redundancy "
            f"{min(max(redundancy, 1), num_groups)}"
        )
    tried = set(range(2, min(REDUNDANCY_MAX, num_groups) + 1))
    if cluster.data == "shared":
        tried.add(num_groups)
    if redundancy is not None:
        tried.add(redundancy)
    candidates = tuple(candidate(cluster, each) for each in sorted(tried))
    if redundancy is not None:
        allowed = [each for each in candidates if each.redundancy == redundancy]
    elif cluster.data == "shared":
        allowed = [each for each in candidates if each.redundancy == num_groups]
    else:
        allowed = list(candidates)
    possible = [each for each in allowed if each.outcome is not None]
    if not possible:
        raise ConfigError(_impossible(cluster, allowed))
    best = min(ratio_of(each) for each in possible)
    enough = best * (1 + TIE) if longest is None else max(best, longest)
    chosen = next(each for each in possible if ratio_of(each) <= enough)
    return RedundancyPlan(
        chosen, candidates, tuple(possible), _reason(cluster, chosen, candidates, redundancy is not None)
    )


def choose_granularity(
    cluster: ClusterFigures, redundancy: int | None = None, plan: RedundancyPlan | None = None
) -> tuple[RedundancyPlan, str]:
    """The plan in the granularity with the shorter time to train (``cluster.granularity`` is ignored), and a clause
    that says what the other would take. ``plan``: that of single microbatches, where it is known."""
    plan = plan or choose(replace(cluster, granularity="microbatch"), redundancy)
    try:
        whole = choose(replace(cluster, granularity="shard"), redundancy)
    except ConfigError:
        return plan, "with whole shards (--granularity shard) the job would make no progress"
    share, r = ratio_of(whole.chosen) / ratio_of(plan.chosen), whole.chosen.redundancy
    if share < 1 - TIE:
        return whole, f"single microbatches (--granularity microbatch) would take {1 / share:.3f} of that time"
    return plan, f"whole shards (--granularity shard, r = {r}) would take {share:.3f} of that time"


@lru_cache(maxsize=1024)
def candidate(cluster: ClusterFigures, redundancy: int) -> Candidate:
    """The candidate with this redundancy on this cluster."""
    num_groups = cluster.num_groups
    whole = cluster.granularity == "shard"
    pieces = 1 if whole else cluster.pieces_per_shard
    adoption = _adoption(cluster, redundancy)
    lifetimes, loads = expected_load(num_groups, redundancy, pieces, adoption is not None)
    hosts = max(1, redundancy - 1)
    patch = ratio.PatchCost(SHARD_PATCHES) if whole else ratio.PatchCost.spread(pieces, hosts)
    stage_s = cluster.stage_s(redundancy)
    costs = _costs(cluster, stage_s)
    if cluster.rejoin_s is None:
        found = ratio.outcome(
            num_groups,
            loads.after,
            lifetimes.survival,
            patch,
            costs=costs,
            planned=cluster.planned_restarts,
            adoption=adoption,
        )
        if _lasting_s(cluster, lifetimes.mean) < cluster.restart_s + stage_s + cluster.save_s:
            found = None
    else:
        shard_patch = SHARD_PATCHES if whole else None
        sharing = rejoin.Sharing(redundancy, pieces, loads.after, lifetimes.survival, shard_patch, adoption)
        found = rejoin.steady_course(num_groups, sharing, costs)
    until = loads.mean
    if found is not None and found.restart_after is not None:
        states = min(len(loads.after), found.restart_after)
        weights = lifetimes.survival[:states]
        until = float((loads.after[:states] * weights).sum() / weights.sum())
    staged = redundancy * cluster.data_gib / num_groups if cluster.data == "staged" else 0.0
    return Candidate(
        redundancy=redundancy,
        granularity=cluster.granularity,
        endurable_failures=lifetimes.mean,
        mean_work=loads.mean,
        mean_work_until_restart=until,
        stage_gib_per_group=staged,
        stage_s=stage_s,
        outcome=found,
        method=lifetimes.method,
    )


def _survived(cluster: ClusterFigures, endurable_failures: float) -> float:
    """Losses before the wipe-out: with adoption all groups but one."""
    return endurable_failures if cluster.adopt_s is None else cluster.num_groups - 1.0


def _lasting_s(cluster: ClusterFigures, endurable_failures: float) -> float:
    """Mean seconds from a start to the wipe-out at the loss rate of all groups: it takes the losses before it, those
    that standbys replace, and the fatal one. docs/theory.md, section 5."""
    return (_survived(cluster, endurable_failures) + 1 + cluster.standby_groups) * cluster.mtbf_s


def _adoption(cluster: ClusterFigures, redundancy: int) -> Rescue | None:
    """Up to r groups adopt a shard that has lost its last host. Its data are staged first."""
    if cluster.adopt_s is None:
        return None
    return Rescue(cluster.adopt_s + cluster.stage_s(1), min(redundancy, cluster.num_groups - 1))


@lru_cache(maxsize=256)
def expected_load(
    num_groups: int, redundancy: int, pieces: int, adoption: bool = False
) -> tuple[endured.Endured, depth.MaxLoad]:
    """How many losses are endured without adoption, and the load after them, with ``pieces`` pieces to a shard; with
    ``adoption`` after any number."""
    lifetimes, offsets = _lifetimes(num_groups, redundancy)
    return lifetimes, depth.work(num_groups, offsets, pieces, lifetimes, adoption)


def lasting_load(cluster: ClusterFigures, redundancy: int, pieces: int) -> tuple[endured.Floats, depth.MaxLoad]:
    """[N + 1]: the chance that a job attempt endures k losses, and the load after them."""
    adopted = cluster.adopt_s is not None
    lifetimes, loads = expected_load(cluster.num_groups, redundancy, pieces, adopted)
    return (endured.certain(cluster.num_groups, cluster.num_groups - 1) if adopted else lifetimes).survival, loads


@lru_cache(maxsize=256)
def _lifetimes(num_groups: int, redundancy: int) -> tuple[endured.Endured, Sequence[int]]:
    offsets = range(num_groups) if redundancy == num_groups else _offsets(num_groups, redundancy)
    return endured.endured(num_groups, offsets), offsets


def _offsets(num_groups: int, redundancy: int) -> tuple[int, ...]:
    """The offsets that a job would use, where independent ones may exist; else random ones, which endure as many losses
    within 1%, because the search for the least overlap would take too long for a plan."""
    if overlap_bound(num_groups, redundancy) <= 1 and not absent(num_groups, redundancy):
        return build_placement(num_groups, redundancy).offsets
    drawn = np.random.default_rng((num_groups, redundancy)).permutation(num_groups)[:redundancy]
    return tuple(sorted(int(mark) for mark in (drawn - drawn[0]) % num_groups))


def _costs(cluster: ClusterFigures, stage_s: float) -> ratio.Costs:
    same = {field.name: getattr(cluster, field.name) for field in fields(ratio.Costs)}
    rejoin_s = None if cluster.rejoin_s is None else cluster.rejoin_s + stage_s
    return ratio.Costs(**(same | {"restart_s": cluster.restart_s + stage_s, "rejoin_s": rejoin_s}))


def ratio_of(each: Candidate) -> float:
    """Time to train / failure-free time; infinite where there is no progress."""
    return each.outcome.ratio if each.outcome is not None else float("inf")


def _impossible(cluster: ClusterFigures, tried: list[Candidate]) -> str:
    longest = max(tried, key=lambda each: each.endurable_failures)
    needed = cluster
    while needed.mtbf_s < MTBF_S_MAX and candidate(needed, longest.redundancy).outcome is None:
        needed = replace(needed, mtbf_s=needed.mtbf_s * 1.25)
    # At the end of the search no loss rate is known that suffices, so none is advised.
    longer = f"use --mtbf-s {needed.mtbf_s:.3g} or more, or" if needed.mtbf_s < MTBF_S_MAX else "use"
    return (
        f"--mtbf-s {cluster.mtbf_s:g} is too short: redundancy {longest.redundancy} endures "
        f"{_survived(cluster, longest.endurable_failures):.1f} losses and ends with the next, after "
        f"{_lasting_s(cluster, longest.endurable_failures):.0f} s, before a restart of "
        f"{cluster.restart_s + longest.stage_s:g} s and a save of {cluster.save_s:g} s; "
        f"{longer} shorter restarts and saves"
    )


def _reason(cluster: ClusterFigures, chosen: Candidate, candidates: tuple[Candidate, ...], given: bool) -> str:
    found = chosen.outcome
    assert found is not None
    parts = [
        f"{cluster.num_groups} groups lose one every {cluster.mtbf_s:g} s; redundancy {chosen.redundancy} endures "
        f"{chosen.endurable_failures:.1f} losses at a mean load of {chosen.mean_work_until_restart:.3f} shards and "
        f"takes {found.ratio:.3f} times the failure-free time"
    ]
    if cluster.adopt_s is not None and chosen.endurable_failures < cluster.num_groups - 1:
        parts.append(f"a shard without a host is adopted within {cluster.adopt_s + cluster.stage_s(1):.4g} s")
    if given:
        parts.append("the redundancy was given")
    elif cluster.data == "shared":
        parts.append("every group reads every shard, so redundancy costs nothing and is the number of groups")
    else:
        best = min(candidates, key=ratio_of)
        if best is not chosen:
            parts.append(f"{best.redundancy} is at most {TIE:.1%} faster and needs more data per group")
        losers = [each for each in candidates if abs(each.redundancy - chosen.redundancy) == 1]
        parts.extend(_why(each, chosen) for each in losers if each is not best)
    if found.restart_after is not None:
        parts.append(f"a planned restart with {counted(found.restart_after, 'group')} lost beats going on with fewer")
    elif cluster.rejoin_s is not None:
        parts.append("lost groups come back, so no restart is planned")
        parts.append(_return(cluster, chosen))
    return "; ".join(parts)


def _return(cluster: ClusterFigures, chosen: Candidate) -> str:
    """What was assumed of a return."""
    assert cluster.rejoin_s is not None
    assert chosen.outcome is not None
    start_s = cluster.rejoin_s + chosen.stage_s
    step_s = chosen.outcome.interval_s / chosen.outcome.interval_steps
    each_s = cluster.num_groups * cluster.mtbf_s
    away_s = without_a_share_s(start_s, cluster.transfer_s, cluster.result_s, step_s, each_s)
    state = (
        f"{cluster.transfer_s:.4g} s for the state and {cluster.result_s:.4g} s for each result since"
        if cluster.transfer_s > 0
        else "the state at once (its size is not given)"
    )
    return (
        f"assumed of a return: {start_s:.4g} s to start, {state}, admission; {away_s:.4g} s without a share of the work"
    )


def check_transfer(cluster: ClusterFigures) -> None:
    """Raise ConfigError where lost groups would start and never catch up."""
    step_s = cluster.compute_s + cluster.reduce_s
    if cluster.rejoin_s is None or mean_commits_to_admission(cluster.transfer_s, cluster.result_s, step_s) < inf:
        return
    if cluster.result_s >= step_s:
        raise ConfigError(
            f"a result takes {cluster.result_s:.4g} s on its way and a step {step_s:.4g} s, so a lost group would "
            "never catch up; use a higher --transfer-gib-per-s, or leave --rejoin-s out"
        )
    raise ConfigError(
        f"the state takes {cluster.transfer_s:.4g} s on its way, but donors keep {RESULTS_KEPT} results, those of "
        f"{RESULTS_KEPT * step_s:.4g} s, so a lost group would never catch up; use a higher --transfer-gib-per-s, or "
        "leave --rejoin-s out"
    )


def _why(each: Candidate, chosen: Candidate) -> str:
    if each.outcome is None:
        return f"{each.redundancy} makes no progress ({each.endurable_failures:.1f} losses endured)"
    if each.redundancy < chosen.redundancy:
        return f"{each.redundancy} takes {each.outcome.ratio:.3f}: it endures only {each.endurable_failures:.1f} losses"
    return f"{each.redundancy} takes {each.outcome.ratio:.3f}: no shorter, but with more data per group"


def _round(value: float) -> float:
    return float(f"{value:.6g}")
