"""Slow groups are relieved inside a step: they give back pieces that they have not begun, and faster hosts take them.

When a group runs out of pieces, groups that would end much later are *asked* to give back a number of theirs. Each
answers once, with pieces of its plan that it will not begin. An answer by itself changes nothing: the pieces stay in
the giver's plan, so that plans are a partition of the batch at every moment, until a new epoch takes all that was given
out of the givers' plans and appends it to those of others, in one record. That epoch is made when all that were asked
have answered, or when a loss makes one anyway. A group that has given something can vote in no epoch before it, because
its pieces are then not those of its plan; so no commit can come in between. Protocol rule 21.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spare_megatron.config.plural import counted
from spare_megatron.protocol import offers, rebalance
from spare_megatron.protocol.assign_patch import execution_order
from spare_megatron.protocol.audits import name_groups, selected
from spare_megatron.protocol.changed_copy import replace
from spare_megatron.protocol.membership import backoff_s, lose
from spare_megatron.protocol.messages import GaveBack, Loss, Lost, RunningOut, SendAsk
from spare_megatron.protocol.state import Relief, State
from spare_megatron.protocol.transition import Transition, decide, ignore, views
from spare_megatron.protocol.view import ReliefAsk

ROUNDS = 2
"""How often groups are asked in one step, and again after each loss in it and each group that comes to take part."""


def running_out(state: State, event: RunningOut) -> Transition:
    """A group will soon have nothing to do: ask those that would end much later."""
    asked = to_ask(state, event)
    if not asked:
        return ignore(state, f"a group runs out of pieces in step {event.step}; nobody is asked")
    number = state.asks_made + 1
    asks = {group: ReliefAsk(state.fencing, number, pieces) for group, pieces in sorted(asked.items())}
    paces = {group: (left, piece_s) for group, left, piece_s in event.paces}
    relief = Relief(state.relief.rounds + 1, asks, {}, paces)
    last_s = max(left * piece_s for left, piece_s in paces.values())
    reason = (
        f"a group runs out of pieces in step {event.step}, another has {last_s:.2f} s to go; "
        f"{name_groups(sorted(asks))} may give back {counted(sum(asked.values()), 'piece')}"
    )
    sent = [SendAsk(group, state.live[group], event.step, ask) for group, ask in asks.items()]
    return decide(replace(state, relief=relief, asks_made=number), sent, reason)


def to_ask(state: State, event: RunningOut) -> Mapping[int, int]:
    """Group -> how many pieces it would be asked for; empty where nobody is asked."""
    relief, spec = state.relief, state.job
    present = state.phase == "running" and (event.step, event.epoch) == (state.step_in_flight, state.epoch)
    if not present or relief.asked or relief.rounds >= ROUNDS or state.disputes or spec.granularity == "shard":
        return {}
    paces = {group: (left, piece_s) for group, left, piece_s in event.paces if group in state.holders}

    def movable(group: int) -> Sequence[int]:
        left = rebalance.unbegun(state.segments_of(group), paces[group][0])
        return rebalance.first_given((_free(state, pieces) for pieces in left), spec.pieces_per_shard)

    return rebalance.wanted(paces, movable, lambda piece: _hosts(state, piece))


def gave_back(state: State, event: GaveBack) -> Transition:
    """A group answers. When it is the last one, the pieces move in a new epoch."""
    group, relief = event.group, state.relief
    who = f"group {group}"
    if state.live.get(group) != event.incarnation or state.phase != "running" or event.step != state.step_in_flight:
        return ignore(state, f"{who} gives back pieces of step {event.step}, and has no part in it")
    ask = relief.asked.get(group)
    if ask is None or ask != event.ask or relief.given.get(group) == event.pieces:
        return ignore(state, f"{who} answers ask {event.ask.number}, which is known or over")
    own, given = frozenset(_free(state, state.plan.pieces(group))), frozenset(event.pieces)
    fits = len(given) == len(event.pieces) <= ask.pieces and given <= own
    if group in relief.given or not fits:
        detail = f"gives back {counted(len(event.pieces), 'piece')} of step {event.step} that it may not give"
        return lose(state, Lost((Loss(group, event.incarnation, "diverged", detail=detail),)))
    answered = replace(state, relief=replace(relief, given={**relief.given, group: event.pieces}))
    why = f"{who} gives back {counted(len(event.pieces), 'piece')}"
    if len(answered.relief.given) < len(relief.asked):
        return ignore(answered, f"{why}; {len(answered.relief.given)} of {len(relief.asked)} have answered")
    return _moved(answered, why)


def _moved(state: State, why: str) -> Transition:
    """All have answered: what they gave goes to others in a new epoch of the same members."""
    relief = replace(state.relief, asked={}, given={})
    given = {group: pieces for group, pieces in state.relief.given.items() if pieces}
    if not given:
        return ignore(replace(state, relief=relief), f"{why}; nothing moves")
    taken = rebalance.shared_out(given, state.relief.paces, lambda piece: _hosts(state, piece))
    spec = state.job
    more = {
        group: execution_order(pieces, state.where, spec.pieces_per_shard) for group, pieces in sorted(taken.items())
    }
    plan = state.plan.without(given).grown(tuple(sorted(state.live)), more)
    retries = replace(state.retries, since=state.epoch + 1 if state.joiners else state.retries.since)
    again = offers.offered(replace(state, epoch=state.epoch + 1, votes={}, plan=plan, relief=relief, retries=retries))
    total = counted(sum(map(len, given.values())), "piece")
    reason = (
        f"{why}; epoch {again.epoch}, same {counted(len(again.live), 'group')}; step {again.step_in_flight}: {total} "
        f"of {name_groups(sorted(given))} to {name_groups(sorted(more))}"
    )
    return decide(again, views(again, backoff_s(state.retries.failures)), reason)


def _free(state: State, pieces: Sequence[int]) -> tuple[int, ...]:
    """The pieces that may move: not those that an auditor computes too."""
    audited = frozenset(selected(state.job, state.step_in_flight, pieces))
    return tuple(piece for piece in pieces if piece not in audited)


def _hosts(state: State, piece: int) -> Sequence[int]:
    """The holders that host a piece."""
    hosts = state.where.hosts_of(piece // state.job.pieces_per_shard)
    return hosts if len(state.holders) == state.job.num_groups else [g for g in hosts if g in state.holders]
