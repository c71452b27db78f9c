"""Finds who is wrong, and where, when weights differ between groups (protocol rule 12).

Every vote carries a digest of the weights that its step began with, and a vote at the end of the run one of the last
weights. A digest cannot say which rank's parameter is damaged, and a checksum of each parameter in every vote would
cost many times as much. So when votes differ and a majority agrees, they are not counted: a new epoch of the same
members asks for the checksum of each parameter, and then the minority is fenced with the place of the damage named.

Where groups keep only some state shards, most members have the weights of a shard from its primary, right or wrong, so
that a majority of members proves nothing. There the votes of its hosts are compared for each shard, and then the
weights: those are right whose groups agree and, between them, host every shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from spare_megatron.protocol import audits, state_shards
from spare_megatron.protocol.changed_copy import replace
from spare_megatron.protocol.messages import WEIGHTS, Loss
from spare_megatron.protocol.state import State
from spare_megatron.protocol.transition import Transition, decide, minority, stop, views, with_checkpoint

Fence = Callable[[State, tuple[Loss, ...]], Transition]


class _Judged(NamedTuple):
    """What votes say of weights and of copies of state shards."""

    wrong: frozenset[int] = frozenset()
    """All groups that are found to be wrong."""
    unlike: Mapping[int, list[int]] = MappingProxyType({})
    """Those of them whose copies are, and of which state shards."""
    unclear: str = ""
    """Why nobody can say who is wrong; empty where that is clear."""


def check_weights(state: State, fence: Fence) -> Transition | None:
    """The transition that follows when the weights in the votes differ; None when they are all the same. ``fence``
    makes the transition that loses groups."""
    step = state.committed[0]
    found = _judged_by_hosts(state) if state.state_hosts else _judged_by_members(state)
    stops = found.unclear
    if found.unlike and (state.save or state.phase == "ending"):
        who = audits.name_groups(sorted(found.unlike))
        stops = f"copies of state shards of {who} after step {step} are wrong, and may be in its checkpoint"
    if stops:
        return stop(state, "failed", with_checkpoint(state, stops))
    if not found.wrong:
        return None
    if WEIGHTS in state.disputes:
        right = sorted(state.votes.keys() - found.wrong)
        losses = diverged(state, found.wrong - found.unlike.keys(), f"weights after step {step} differ", right)
        for group, shards in sorted(found.unlike.items()):
            losses += diverged(state, [group], f"copy of {state_shards.named(shards)} after step {step} differs", right)
        return fence(state, losses)
    accused = frozenset((group, state.live[group]) for group in found.wrong)
    asked = replace(
        state,
        epoch=state.epoch + 1,
        votes={},
        accused=state.accused | accused,
        applied_last=frozenset(),
        disputes={**state.disputes, WEIGHTS: {}},
    )
    who = audits.name_groups(sorted(found.wrong))
    what = "weights" if not found.unlike else "weights or state shards"
    reason = f"the {what} of {who} after step {step} differ from the majority's; epoch {asked.epoch} asks where"
    return decide(asked, views(asked), reason)


def _judged_by_members(state: State) -> _Judged:
    """Who has other weights than most members."""
    wrong = minority({g: v.result.weights_digest for g, v in state.votes.items()}, state.is_independent)
    if wrong is None:
        return _Judged(
            unclear=f"the weights after step {state.committed[0]} differ between groups and no majority agrees"
        )
    return _Judged(wrong)


def _judged_by_hosts(state: State) -> _Judged:
    """Who has another copy than most hosts of a state shard, or other weights than hosts of all shards that agree.
    Where weights have no digests, sums are not exact, and copies may differ."""
    weights = {g: v.result.weights_digest for g, v in state.votes.items() if v.result.weights_digest}
    step, copies = state.committed[0], state_shards.copies_voted(state) if weights else {}
    unlike: dict[int, list[int]] = {}
    for shard, voted in copies.items():
        for group in minority(voted, lambda group: True) or ():
            unlike.setdefault(group, []).append(shard)
    unclear = [s for s, voted in copies.items() if len({voted[group] for group in voted.keys() - unlike.keys()}) > 1]
    if unclear:
        what = state_shards.named(unclear)
        return _Judged(unclear=f"the hosts of {what} have different copies after step {step} and no majority agrees")
    hosted = {weights[group]: set[int]() for group in weights.keys() - unlike.keys()}
    if len(hosted) > 1:
        for shard, voted in copies.items():
            for group in voted.keys() & weights.keys() - unlike.keys():
                hosted[weights[group]].add(shard)
        right = [digest for digest, shards in hosted.items() if len(shards) == state.job.state_shards]
        if not right:
            why = "no groups that agree are hosts of all state shards"
            return _Judged(unclear=f"the weights after step {step} differ between groups and {why}")
        return _Judged(frozenset(g for g, digest in weights.items() if g in unlike or digest not in right), unlike)
    return _Judged(frozenset(unlike), unlike)


def diverged(state: State, suspects: Iterable[int], what: str, right: Iterable[int] = ()) -> tuple[Loss, ...]:
    """The losses of ``suspects``, of which ``what`` says how they are wrong ('weights after step 3 differ'), with the
    place where the votes show it; ``right`` are the groups to compare with."""
    others = list(right)
    found = []
    for group in sorted(suspects):
        position, names = audits.place(state, WEIGHTS, group, others)
        detail = f"its {what} from the majority's{audits.listed(names)}"
        found.append(Loss(group, state.live[group], "diverged", position, detail))
    return tuple(found)
