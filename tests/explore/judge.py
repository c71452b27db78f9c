"""Checks, as an observer of the whole job, each decision of the coordinator and each step that a group applies."""

from __future__ import annotations

from spare_megatron.protocol import messages as m
from tests.explore.brain import Step
from tests.explore.process import Process, Result, Violation
from tests.explore.shape import Shape
from tests.explore.world import NOTHING, World


def decided(w: World, shape: Shape, event: m.Event, done: Step) -> World:
    """Check a decision of the coordinator; returns the world with what the observer remembers of it.

    Raises:
        Violation: the decision is wrong.
    """
    if shape.kinds & {"damage", "err"}:
        w = _from_independent(w, done)
    elif done.fenced:
        raise Violation(f"an innocent group is fenced: {done.reason}")
    w = offered(w, event, done)
    before, after = w.brain.state, done.after.state
    if after.phase == "stopped" and before.phase != "stopped":
        if not shape.late_finals:
            _ended(w, shape, done)
        w = w._replace(offered=NOTHING)
    return w


def _from_independent(w: World, done: Step) -> World:
    """Check that only damaged groups are fenced for damage, and that checkpoints that count have the right weights
    where votes could tell."""
    for group, incarnation, why in done.fenced:
        if (group, incarnation) not in w.guilty:
            raise Violation(f"innocent group {group} is fenced: {why}")
    blind = w.blind or (bool(w.guilty) and len(w.brain.state.independent & done.after.state.live.items()) < 2)
    against = w.against | done.against
    for accept in done.accepted:
        spoken = (accept.step, accept.directory) in against
        unseen = blind or done.after.state.outcome == "wipe-out"
        if accept.directory != str(accept.step) and (spoken or not unseen):
            raise Violation(f"a checkpoint of step {accept.step} counts, its weights are {accept.directory!r}")
    return w._replace(blind=blind, against=against)


def offered(w: World, event: m.Event, done: Step) -> World:
    """Remember the newest checkpoint that a member asked about, until it or a newer one counts."""
    if isinstance(event, m.Saved) and w.brain.state.live.get(event.group) == event.incarnation:
        w = w._replace(offered=max(w.offered, (event.step, event.directory)))
    return w._replace(offered=NOTHING) if done.after.state.saved_step >= w.offered[0] else w


def _ended(w: World, shape: Shape, done: Step) -> None:
    """Check that the job fails only for a cause, ends with its last step saved, and throws no good checkpoint away."""
    before, after = w.brain.state, done.after.state
    nobody_adopts = shape.hasty and (len(before.live) == 1 or bool(before.unable))
    if after.outcome == "failed" and not (w.guilty or before.phase == "forming" or nobody_adopts):
        raise Violation(f"the job fails without a cause: {done.reason}")
    complete = after.outcome in ("finished", "left") and before.phase == "ending"
    if complete and after.saved_step != after.committed[0]:
        raise Violation(f"the job ends before its last step is saved: {done.reason}")
    if after.outcome == "wipe-out" and w.offered != NOTHING and w.offered not in w.against:
        raise Violation(f"nothing speaks against the checkpoint of step {w.offered[0]}: {done.reason}")


def left(w: World, p: Process) -> None:
    """Check a process that leaves because of a message: only the present coordinator may fence a member.

    Raises:
        Violation: a coordinator that was replaced fences one.
    """
    fenced = isinstance(p.down[0].value, m.SendFenced)
    if fenced and p.where != w.brain.state.fencing and w.is_member(p):
        raise Violation(f"coordinator {p.where}, which was replaced, throws out group {p.name}")


def applied(w: World, p: Process, result: Result, batch: list[int]) -> None:
    """Check what a group applies: the same as the others, with each piece of the batch once, and with the right
    gradient of each audited piece, on which owner and auditor agree (two groups never compute the same wrong gradient;
    an auditor that got the piece itself, when its owner was lost, is nobody to compare with).

    Raises:
        Violation: one of these does not hold.
    """
    for known in w.results:
        if known.value.step == result.step and known.value != result:
            raise Violation(f"step {result.step} is applied as {known.value} and as {result}")
    inside = {piece: checksum for *_, ran, _ in result.parts for piece, checksum in ran}
    if sorted(piece for *_, ran, _ in result.parts for piece, _ in ran) != batch:
        raise Violation(f"group {p.name} applies pieces {sorted(inside)} for step {result.step}")
    alone = {(group, piece) for group, _, ran, _ in result.parts for piece, _ in ran}
    for group, _, _, audited in result.parts:
        for piece, checksum in audited:
            if (group, piece) not in alone and not checksum == inside[piece] == piece:
                raise Violation(f"piece {piece} of step {result.step} is applied as {inside[piece]}, found {checksum}")
