"""Finds who is wrong, and where, when weights differ between groups (protocol rule 12).

Every vote carries a digest of the weights that its step began with, and a vote at the end of the run one of the last
weights. A digest cannot say which rank's parameter is damaged, and a checksum of each parameter in every vote would
cost many times as much. So when votes differ and a majority agrees, they are not counted: a new epoch of the same
members asks for the checksum of each parameter, and then the minority is fenced with the place of the damage named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from spare_megatron.protocol import audits
from spare_megatron.protocol.changed_copy import replace
from spare_megatron.protocol.messages import WEIGHTS, Loss
from spare_megatron.protocol.state import State
from spare_megatron.protocol.transition import Transition, decide, minority, stop, views, with_checkpoint

Fence = Callable[[State, tuple[Loss, ...]], Transition]


def check_weights(state: State, fence: Fence) -> Transition | None:
    """The transition that follows when the weights in the votes differ; None when they are all the same. ``fence``
    makes the transition that loses groups."""
    suspects = minority({g: v.result.weights_digest for g, v in state.votes.items()}, state.is_independent)
    step = state.committed[0]
    if suspects is None:
        reason = f"the weights after step {step} differ between groups and no majority agrees"
        return stop(state, "failed", with_checkpoint(state, reason))
    if not suspects:
        return None
    if WEIGHTS in state.disputes:
        right = sorted(state.votes.keys() - suspects)
        return fence(state, diverged(state, suspects, f"weights after step {step} differ", right))
    accused = frozenset((group, state.live[group]) for group in suspects)
    asked = replace(
        state,
        epoch=state.epoch + 1,
        votes={},
        accused=state.accused | accused,
        applied_last=frozenset(),
        disputes={**state.disputes, WEIGHTS: {}},
    )
    who = audits.name_groups(sorted(suspects))
    reason = f"the weights of {who} after step {step} differ from the majority's; epoch {asked.epoch} asks where"
    return decide(asked, views(asked), reason)


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
