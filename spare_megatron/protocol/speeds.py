"""Groups that are slow for long get a smaller share of each later step, from its beginning.

What slows a group down for one step is for relief (protocol.relief). A group that is slow for hours would be relieved
anew in each step: asks, answers and an epoch, and by then it has begun pieces that others would have ended sooner. So
its slowness is kept in the state, and the steady-state assignment is drawn for it (protocol.assign). Protocol rule 24.

Nothing changes by noise: a group counts as slow when it was slow in both halves of the steps in which it was measured,
and as usual when it was that in both; its slowness is in whole sixteenths, and changes by ``NOISE`` or more of them;
what follows a change is measured anew. And the steady-state assignment changes only where steps become shorter by
enough. Microbatch granularity only: whole shards are shared out as if all groups were equally fast.
"""

from __future__ import annotations

from collections.abc import Mapping

from spare_megatron.config.plural import counted
from spare_megatron.protocol.assign import WipeOut
from spare_megatron.protocol.assign_slowness import slowness_of
from spare_megatron.protocol.assign_types import USUAL
from spare_megatron.protocol.audits import name_groups
from spare_megatron.protocol.changed_copy import replace
from spare_megatron.protocol.messages import SpeedsMeasured
from spare_megatron.protocol.standing import draw_standing
from spare_megatron.protocol.state import State
from spare_megatron.protocol.transition import Transition, decide, ignore

SLOW = 1.15
"""A group is slow if a piece takes it so many times as long as the median group."""
NOT_SLOW = 1.1
"""And is slow no more below that."""
NOISE = 2
"""By how many sixteenths the slowness of a slow group changes at least."""
GAIN = USUAL // 2
"""So much sooner, in sixteenths of a usual group's piece, a step must end by a new steady-state assignment,"""
GAIN_SHARE = 0.02
"""or by this share of it."""


def measured(state: State, event: SpeedsMeasured) -> Transition:
    """Keep what was measured; where that shortens steps by enough, the next commit shares later steps out by it."""
    after = slowness_after(state, event)
    if after == state.slowness:
        return ignore(state, f"speeds were measured up to step {event.step}, and nothing changes by them")
    noted = replace(state, slowness=after, slowness_step=event.step)
    known_of = state.slowness
    changed = sorted(group for group in {*after, *known_of} if after.get(group) != known_of.get(group))
    now = ", ".join(f"{after.get(group, USUAL) / USUAL:.2f}" for group in changed)
    why = (
        f"by the last {counted(event.steps, 'step')} up to {event.step}, a piece takes {name_groups(changed)} {now} "
        "times as long as the median group"
    )
    live = tuple(sorted(state.live))
    drawn = draw_standing(noted, live)
    assert not isinstance(drawn, WipeOut), "the members host every shard"
    present = state.standing
    assert present is not None, "a running job has a steady-state assignment"
    known = slowness_of(state.job.num_groups, drawn.assignment.live, after)
    before = int((present.assignment.loads * known).max())
    gain = before - drawn.assignment.end
    enough = gain >= GAIN or gain >= GAIN_SHARE * before
    figures = f"steps would end after {drawn.assignment.end / USUAL:.2f} usual pieces instead of {before / USUAL:.2f}"
    if not enough:
        return decide(noted, [], f"{why}; {figures}, which is not worth a change")
    return decide(replace(noted, share_anew=True), [], f"{why}; {figures}, from step {state.step_in_flight + 1} on")


def slowness_after(state: State, event: SpeedsMeasured) -> Mapping[int, int]:
    """What ``State.slowness`` is after the event; the same where the event is of no use."""
    fresh = event.step == state.committed[0] and event.step - event.steps >= state.slowness_step
    if state.phase != "running" or state.leave or not fresh or state.job.granularity == "shard":
        return state.slowness
    most = USUAL * state.job.pieces_per_shard  # every group can do one piece by the end, so it can be measured again
    after = dict(state.slowness)
    for group, incarnation, first, second in event.paces:
        if state.live.get(group) != incarnation:
            continue
        found, known = min(most, round((first + second) / 2 * USUAL)), after.get(group, USUAL)
        if min(first, second) >= SLOW and found > USUAL and (known == USUAL or abs(found - known) >= NOISE):
            after[group] = found
        elif max(first, second) < NOT_SLOW:
            after.pop(group, None)
    return after
