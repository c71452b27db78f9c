"""Groups that have adopted a shard say that its data are open, or that they cannot open them (protocol rule 23)."""

from __future__ import annotations

from spare_megatron.config.plural import counted
from spare_megatron.protocol import adoption
from spare_megatron.protocol.membership import lose, take
from spare_megatron.protocol.messages import Hosts, Loss, Lost
from spare_megatron.protocol.standing import leaving
from spare_megatron.protocol.state import State
from spare_megatron.protocol.transition import Transition, ignore


def hosts(state: State, event: Hosts) -> Transition:
    """A group that could not open a shard hosts it no more: its pieces of it, of which it has begun none, go to another
    in a new epoch. One that could may be what a group that is to leave has waited for."""
    group, shard = event.group, event.shard
    opened = state.adopted.get(group, {}).get(shard)
    there = state.live.get(group) == event.incarnation and state.phase in ("running", "ending")
    if not there or opened is None or (opened and event.opened):
        return ignore(state, f"group {group} says of shard {shard} what is known, or is no adopter of it")
    if opened:
        detail = f"cannot open shard {shard}, which it had opened: {event.detail}"
        return lose(state, Lost((Loss(group, event.incarnation, "diverged", detail=detail),)))
    if event.opened:
        after, why = adoption.opened(state, group, shard), f"group {group} has opened shard {shard} and hosts it"
        waited = state.phase == "running" and leaving(after, state.live) != leaving(state, state.live)
        return take(after, state, {}, why) if waited else ignore(after, why)
    after = adoption.refused(state, group, shard)
    why = f"group {group} cannot open shard {shard}: {event.detail or 'no reason given'}"
    if state.phase == "ending":
        return ignore(after, why)
    per_shard = state.job.pieces_per_shard
    pieces = tuple(piece for piece in state.plan.pieces(group) if piece // per_shard == shard)
    return take(after, state, {group: pieces}, f"{why}; others get {counted(len(pieces), 'piece')} of it")
