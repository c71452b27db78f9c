"""Weights that differ between groups: who is wrong, and where (protocol rule 12).

Every vote carries a digest of the weights that its step began with, and the votes of the end one of the last weights.
A digest cannot say which rank's parameter is damaged, and saying it in each vote would cost many times the digest. So
the first votes that differ are not counted: a new epoch of the same members asks for the digest of each parameter, and
the minority is fenced by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from spare_megatron.controller import audits
from spare_megatron.controller.messages import WEIGHTS, Loss
from spare_megatron.controller.state import State
from spare_megatron.controller.transition import Transition, decide, minority, stop, views, with_checkpoint, without

Fence = Callable[[State, tuple[Loss, ...]], Transition]


def check_weights(state: State, fence: Fence) -> Transition | None:
    """What follows when the votes' weights are not all the same; None when they are. ``fence`` loses groups."""
    suspects = minority({g: v.result.weights_digest for g, v in state.votes.items()}, state.witnesses)
    step = state.committed[0]
    if suspects is None:
        reason = f"the weights after step {step} differ between groups and no majority agrees"
        return stop(state, "failed", with_checkpoint(state, reason))
    if not suspects:
        return None
    if WEIGHTS in state.disputes:
        right = sorted(state.votes.keys() - suspects)
        return fence(state, diverged(state, suspects, f"weights after step {step} differ", right))
    asked = replace(
        state,
        epoch=state.epoch + 1,
        votes={},
        unproved=without(state.unproved, {(group, state.live[group]) for group in suspects}),
        applied_last=frozenset(),
        disputes={**state.disputes, WEIGHTS: {}},
    )
    who = audits.name_groups(sorted(suspects))
    reason = f"the weights of {who} after step {step} differ from the majority's; epoch {asked.epoch} asks where"
    return decide(asked, views(asked), reason)


def diverged(state: State, suspects: Iterable[int], what: str, right: Iterable[int] = ()) -> tuple[Loss, ...]:
    """The losses of groups of which ``what`` ('weights after step 3 differ') is said, with the place where votes tell
    it; ``right`` are groups to compare with."""
    others = list(right)
    found = []
    for group in sorted(suspects):
        position, names = audits.place(state, WEIGHTS, group, others)
        detail = f"its {what} from the majority's{audits.listed(names)}"
        found.append(Loss(group, state.live[group], "diverged", position, detail))
    return tuple(found)
