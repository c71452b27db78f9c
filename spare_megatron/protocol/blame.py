"""Finds who is at fault when a reduction fails: the group that explains the links on which nothing arrived.

This is protocol rule 11. A failed attempt is evidence about *links*, not about groups. Where nothing came from a to b
for a whole time-out, a may not be able to send or b not to receive; what the other links of a and b say decides. A
group whose network is dead, in one direction or both, breaks every link that it has in the ring, so it is an end of all
silent links, and with two neighbours the only one. A single silent link has two ends: the step is tried again, and when
the link is silent in a second attempt its sender is taken for the guilty one. (With two groups no more can be known.)

A connection that ended without a message is weak evidence: a death, a restart or the end of an epoch looks the same,
and whoever is behind it is found by other means. It fences a group only after the third failed attempt, and not before
a heartbeat time-out has passed. The same holds for a group that alone fails again and again while no link is to blame:
its own part of the sum is damaged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from spare_megatron.protocol.messages import Link, Vote

FENCE_AFTER_FAILURES = 3
"""Failed attempts of one step before weak evidence counts."""

Pair = tuple[int, int]
"""(sender, receiver)."""
Key = TypeVar("Key", Pair, int)


@dataclass(frozen=True)
class Evidence:
    """What the failed attempts of the step in flight have shown since the members last changed."""

    silent: Mapping[Pair, frozenset[int]] = field(default_factory=dict)
    """Silent link -> the epochs in which it was silent."""
    ended: Mapping[Pair, frozenset[int]] = field(default_factory=dict)
    """Link whose connection ended without a message, or was refused -> the epochs in which that happened."""
    refused: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """Group -> the epochs in which it failed without naming a link."""

    def after(self, vote: Vote) -> Evidence:
        """This evidence together with that of a failed vote."""
        if not vote.result.links:
            return replace(self, refused=_noted(self.refused, [vote.group], vote.result.epoch))
        return replace(
            self,
            silent=_noted(self.silent, [_pair(link) for link in vote.result.links if link.silent], vote.result.epoch),
            ended=_noted(self.ended, [_pair(link) for link in vote.result.links if not link.silent], vote.result.epoch),
        )


@dataclass(frozen=True)
class Culprit:
    """The group that explains the failures, and why."""

    group: int
    why: str


def culprit(evidence: Evidence, live: Iterable[int], failures: int, patient: bool) -> Culprit | None:
    """The group to fence now; None where the step is to be tried again.

    ``failures`` counts the failed attempts; ``patient`` is true once they have gone on for a heartbeat time-out.
    """
    members = frozenset(live)
    silent = {pair: epochs for pair, epochs in evidence.silent.items() if members.issuperset(pair)}
    found = _explains_all(silent) or _silent_again(silent)
    if found is None and failures >= FENCE_AFTER_FAILURES and patient:
        ended = {pair: epochs for pair, epochs in evidence.ended.items() if members.issuperset(pair)}
        found = _most_blamed(ended) or (None if silent or ended else _alone(evidence.refused, members))
    return found


def _explains_all(silent: Mapping[Pair, frozenset[int]]) -> Culprit | None:
    """The one group that is an end of every silent link."""
    ends = [frozenset(pair) for pair in silent]
    common = frozenset.intersection(*ends) if ends else frozenset()
    if len(common) != 1:
        return None
    [group] = common
    return Culprit(group, f"it is the one end that {_listed(silent)} have in common")


def _silent_again(silent: Mapping[Pair, frozenset[int]]) -> Culprit | None:
    """Where no single group explains all silent links: the group that is an end of most of those that were silent in at
    least two attempts; among equals the one that sends on more of them."""
    again = {pair: epochs for pair, epochs in silent.items() if len(epochs) > 1}
    if not again:
        return None
    scores = {
        group: (sum(group in pair for pair in again), sum(group == sender for sender, _ in again), group)
        for group in {end for pair in again for end in pair}
    }
    worst = max(scores, key=lambda group: scores[group])
    return Culprit(worst, f"{_listed(again)} failed in two attempts, {scores[worst][1]} of them from this group")


def _most_blamed(ended: Mapping[Pair, frozenset[int]]) -> Culprit | None:
    """The group to which receivers saw the connection end most often."""
    if not ended:
        return None
    times = {
        group: sum(len(epochs) for (sender, _), epochs in ended.items() if sender == group)
        for group in sorted({sender for sender, _ in ended})
    }
    received = {group: sum(len(e) for (_, receiver), e in ended.items() if receiver == group) for group in times}
    worst = max(times, key=lambda group: (times[group], -received[group], group))
    return Culprit(worst, f"its connections ended {times[worst]} times without a message")


def _alone(refused: Mapping[int, frozenset[int]], members: frozenset[int]) -> Culprit | None:
    """The only group that fails, if it failed often enough without naming a link."""
    failing = {group: epochs for group, epochs in refused.items() if group in members}
    if len(failing) != 1:
        return None
    [(group, epochs)] = failing.items()
    if len(epochs) < FENCE_AFTER_FAILURES:
        return None
    return Culprit(group, f"it alone failed {len(epochs)} attempts, and no link explains it")


def _pair(link: Link) -> Pair:
    return link.sender, link.receiver


def _noted(known: Mapping[Key, frozenset[int]], keys: Iterable[Key], epoch: int) -> dict[Key, frozenset[int]]:
    noted = dict(known)
    for key in keys:
        noted[key] = noted.get(key, frozenset()) | {epoch}
    return noted


def _listed(links: Iterable[Pair]) -> str:
    names = [f"{sender} to {receiver}" for sender, receiver in sorted(links)]
    return f"silent link{'' if len(names) == 1 else 's'} {', '.join(names)}"
