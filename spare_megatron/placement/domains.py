"""Chooses the group numbers of machines so that the hosts of a shard lie in different failure domains (racks, power).

The placement is cyclic over group numbers and is not changed; only which machines get which number is chosen. Two
groups host a common shard when the distance of their numbers is a difference of two offsets: then they should not be in
one domain. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spare_megatron.config.errors import ConfigError
from spare_megatron.placement.placement import Placement

REPAIR_ROUNDS = 3
"""Passes in which numbers of groups with a common shard and domain are exchanged with others."""
SAMPLED_ORDERS = 400
"""Random orders of domain losses over which the reported mean is taken."""


@dataclass(frozen=True)
class Spread:
    """The group number of each group of machines, and what that gains over the numbers of the topology file."""

    numbers: tuple[int, ...]
    """numbers[g] is the new number of the group that the topology file lists as group g."""
    sharing_before: int
    """Pairs of hosts of one shard that are in one domain, summed over all shards, with the numbers of the file."""
    sharing_after: int
    """The same with the new numbers."""
    domains_endured_before: float
    """Mean number of domains, lost as a whole in random order, before the fatal one; with the numbers of the file."""
    domains_endured_after: float
    """The same with the new numbers."""

    @property
    def reason(self) -> str:
        """One sentence with the figures before and after."""
        return (
            f"host pairs of a shard in one failure domain: {self.sharing_before} -> {self.sharing_after}; losses of "
            f"whole domains endured: {self.domains_endured_before:.1f} -> {self.domains_endured_after:.1f}"
        )

    def as_json(self) -> dict[str, object]:
        """All fields and the reason."""
        return {
            "group_numbers": list(self.numbers),
            "sharing_before": self.sharing_before,
            "sharing_after": self.sharing_after,
            "domains_endured_before": round(self.domains_endured_before, 2),
            "domains_endured_after": round(self.domains_endured_after, 2),
            "reason": self.reason,
        }


def parse_topology(lines: Iterable[str], name: str, num_groups: int) -> tuple[str, ...]:
    """The domain of each group, from lines ``GROUP,DOMAIN``, one for every group; a heading ``group,domain`` is
    skipped.

    Raises:
        ConfigError: naming the line."""
    found: dict[int, str] = {}
    for number, raw in enumerate(lines, start=1):
        line = raw.strip()
        if not line or (number == 1 and line.replace(" ", "").lower() == "group,domain"):
            continue
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != 2 or not cells[0].isdecimal() or not cells[1]:
            raise ConfigError(f"{name} line {number} is {line!r}, but must be GROUP,DOMAIN")
        group = int(cells[0])
        if group >= num_groups or group in found:
            why = "is listed twice" if group in found else f"is not in 0..{num_groups - 1}"
            raise ConfigError(f"{name} line {number}: group {group} {why}; list each of the {num_groups} groups once")
        found[group] = cells[1]
    missing = [group for group in range(num_groups) if group not in found]
    if missing:
        raise ConfigError(f"{name} lacks {len(missing)} of {num_groups} groups, the first is {missing[0]}; add them")
    return tuple(found[group] for group in range(num_groups))


def spread_over_domains(placement: Placement, domains: Sequence[str], seed: int = 0) -> Spread:
    """The group numbers with the fewest host pairs in one domain that a greedy choice and exchanges find; never worse
    than the given ones. ``domains[g]`` is the domain of group g."""
    listed = np.unique(np.asarray(domains), return_inverse=True)[1].astype(np.int64)
    near = _distances(placement)
    chosen = _exchanged(_greedy(listed, near), near, seed)
    before, after = _sharing(listed, near), _sharing(chosen, near)
    if after >= before:
        chosen, after = listed, before
        numbers = tuple(range(len(listed)))
    else:
        numbers = _numbers(listed, chosen)
    return Spread(
        numbers,
        before // 2,
        after // 2,
        domains_endured(placement, listed, seed),
        domains_endured(placement, chosen, seed),
    )


def domains_endured(placement: Placement, domain: NDArray[np.int64], seed: int = 0) -> float:
    """Mean number of domains, lost as a whole in random order, before the one that takes the last host of a shard.

    ``domain`` [N] has the domain number of each group, from 0.
    """
    rng = np.random.default_rng((seed, placement.num_groups, placement.redundancy))
    count = int(domain.max()) + 1
    hosts = placement.hosts()
    fatal = [int(rng.permutation(count)[domain][hosts].max(axis=1).min()) for _ in range(SAMPLED_ORDERS)]
    return float(np.mean(fatal))


def _distances(placement: Placement) -> NDArray[np.int64]:
    """The differences of all ordered pairs of offsets, mod N; one that several pairs have is repeated."""
    marks = np.asarray(placement.offsets, dtype=np.int64)
    differences = (marks[:, None] - marks[None, :]) % placement.num_groups
    return differences[~np.eye(len(marks), dtype=np.bool_)]


def _sharing(domain: NDArray[np.int64], near: NDArray[np.int64]) -> int:
    """Number of ordered pairs of group numbers that are in one domain and at one of the distances ``near``."""
    return int(sum(int((domain == np.roll(domain, -int(distance))).sum()) for distance in near))


def _greedy(listed: NDArray[np.int64], near: NDArray[np.int64]) -> NDArray[np.int64]:
    """Assign a domain to each number in turn: the one with the fewest assigned numbers at the distances ``near``, among
    equals the one with most unassigned groups."""
    size = len(listed)
    left = np.bincount(listed)
    chosen = np.full(size, -1, dtype=np.int64)
    for number in range(size):
        neighbours = chosen[(number + near) % size]
        taken = np.bincount(neighbours[neighbours >= 0], minlength=len(left))
        cost = taken.astype(np.float64) - left / (size + 1)
        cost[left == 0] = np.inf
        chosen[number] = int(np.argmin(cost))
        left[chosen[number]] -= 1
    return chosen


def _exchanged(chosen: NDArray[np.int64], near: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
    """Exchange the domains of two numbers where that lowers the number of pairs in one domain."""
    rng = np.random.default_rng((seed, len(chosen)))
    size = len(chosen)

    def cost(number: int, domain: int) -> int:
        return int((chosen[(number + near) % size] == domain).sum())

    for _ in range(REPAIR_ROUNDS):
        sharing = [number for number in range(size) if cost(number, int(chosen[number]))]
        for number in sharing:
            here = int(chosen[number])
            for other in rng.permutation(size)[:64].tolist():
                there = int(chosen[other])
                if there == here or ((other - number) % size in near):
                    continue
                if cost(number, there) + cost(other, here) < cost(number, here) + cost(other, there):
                    chosen[number], chosen[other] = there, here
                    break
    return chosen


def _numbers(listed: NDArray[np.int64], chosen: NDArray[np.int64]) -> tuple[int, ...]:
    """The number of each listed group: the k-th group of a domain takes the k-th number assigned to that domain."""
    numbers = np.empty(len(listed), dtype=np.int64)
    numbers[np.argsort(listed, kind="stable")] = np.argsort(chosen, kind="stable")
    return tuple(int(number) for number in numbers)
