"""The judge of a walk in which every kind of fault may meet every other: it has a notion of its own of what is true.

It knows which incarnation was damaged (a copy of a damaged state is damaged as well), who computed wrongly in which
step, what was voted and agreed, who was ever compared. From the world, not from the machine's bookkeeping, it
demands:

* *Nobody innocent is fenced for good.* Who is fenced for its weights was damaged, or copied from who was; who is
  fenced for a gradient computed wrongly in this very step. Two damages never give the same weights, and two groups
  never the same wrong gradient. So honest voters always agree with each other, and liars are never outnumbered by
  copies of each other but where a copy is taken for an independent copy: no reading of votes allows it. The one
  exception is a learner that was brought up to date rightly while all voters were wrong (then nobody could tell).
* *A checkpoint counts* only with the weights on which votes agreed for its step. At a wipe-out it may also be one
  that was never compared; not one against which a majority spoke, nor one whose own writer has voted other weights
  for that step than those on which all agreed.
* *An ordered save is made or ordered again:* where the member that is to write it is no member any more, the next
  commit (unless the run ends) orders one.
* *The job stops only where it must.* A wipe-out is justified where no member and no learner that the coordinator
  counted on a moment ago, and has not just lost, holds t\\* (as it has said, or voted for it) in a state that was
  compared; or where some shard has no host left among them: a member, a learner that was ever ready, or, with
  adoption, a holder that has not said that it cannot. All these processes must really be there. While a run ends only
  members can go on.
* *It fails* while it forms; where votes differ and the honest ones are no majority of the living independent members;
where
  opinions on a piece differ and the honest, with all living hosts that could still be asked, do not outnumber the
  others; or where a group that stands still cannot be lost, by the same measure as for a wipe-out.
* *A run that finishes has saved its last step*; a wipe-out keeps a waiting checkpoint that nothing speaks against.
* *Nobody is left without a message:* who is connected, was received, and is neither member nor learner has its fence or
the end on
  the way.

Plans that are no partition, commits that are repeated or skipped, different results of one step are found by
:mod:`spare_megatron.protocol.invariants` and :func:`tests.explore.judge.applied`.
"""

from __future__ import annotations

from collections.abc import Iterable

from spare_megatron.protocol import messages as m
from spare_megatron.protocol.learner import Learner
from spare_megatron.protocol.state import State
from tests.explore import shard_judge
from tests.explore.brain import Step
from tests.explore.judge import offered
from tests.explore.memory import Memory, Who
from tests.explore.process import Process, Violation
from tests.explore.shape import Shape
from tests.explore.world import NOTHING, World


def blamed(w: World, who: Who, step: int) -> World:
    """The world that remembers that ``who`` was damaged (``step`` -1), or computed wrongly in a step."""
    known = w.memory
    if step < 0:
        return w._replace(memory=known._replace(damaged=known.damaged | {who}))
    return w._replace(memory=known._replace(erred=known.erred | {(who, step)}))


def decided(w: World, shape: Shape, event: m.Event, done: Step) -> World:
    """Check a decision of the coordinator; returns the world with what the judge remembers of it.

    Raises:
        Violation: the decision is wrong.
    """
    before, after = w.brain.state, done.after.state
    known = _received(w.memory, before, event)
    if done.fenced:
        _innocent(w, known, done)
    agreed = _agreed(before, event, done.gone)
    if agreed is not None and agreed not in known.agreed:
        known = known._replace(agreed=(*known.agreed, agreed))
    against = w.against | done.against
    for accept in done.accepted:
        _counts(accept, known, against, after)
    w = offered(w._replace(against=against), event, done)
    if after.phase == "stopped" and before.phase != "stopped":
        _stopped(w, shape, known, event, done)
        w = w._replace(offered=NOTHING)
    known = _membership(known, before, after, done)
    return w if known is w.memory else w._replace(memory=known)


def reported(w: World) -> None:
    """Check that nobody waits for a word that will never come.

    Raises:
        Violation: a process is no member and no learner, and receives nothing.
    """
    state = w.brain.state
    if state.phase == "stopped":
        return
    for p in w.processes:
        if p.where != state.fencing or (p.up and isinstance(p.up[0].value, m.Hello)):
            continue
        last = p.down[-1].value if p.down else None
        if not w.is_member(p) and not isinstance(last, m.SendFenced):
            raise Violation(f"group {p.name} is neither a member nor a learner, and nobody tells it")


# ------------------------------------------------------------------------------------------------------ what is known


def _received(known: Memory, before: State, event: m.Event) -> Memory:
    """What an event says."""
    if isinstance(event, m.Vote):
        who, result = (event.group, event.incarnation), event.result
        if before.live.get(event.group) != event.incarnation or not result.ok or result.at[1] != before.epoch:
            return known
        if result.step != before.step_in_flight:
            return known
        if result.weights_digest != str(result.step - 1):
            known = known._replace(reported=known.reported | {(who, result.step - 1, result.weights_digest)})
        found = (*result.checksums, *result.audits)
        if found:
            kept = [o for o in known.opinions if o[0] == result.step and not (o[2][0] == who[0] and o[2] != who)]
            more = [(result.step, piece, who, checksum) for piece, checksum in found]
            known = known._replace(opinions=tuple(dict.fromkeys((*kept, *more))))
    elif isinstance(event, m.Saved):
        who = (event.group, event.incarnation)
        known = known._replace(wrote=known.wrote | {(who, event.step, event.directory)})
    elif isinstance(event, m.Ready):
        if before.learners.get(event.group) and before.learners[event.group].incarnation == event.incarnation:
            known = known._replace(ready=known.ready | {(event.group, event.incarnation)})
    elif isinstance(event, m.CaughtUp):
        learner = before.learners.get(event.group)
        offer = learner.offer if learner and learner.incarnation == event.incarnation else None
        if offer is not None and offer.number == event.number:
            reported = ((event.group, event.incarnation), event.number, offer.step, event.step, event.weights_digest)
            known = known._replace(caught=tuple(dict.fromkeys((*known.caught, reported))))
    return known


def _agreed(before: State, event: m.Event, gone: tuple[Who, ...]) -> tuple[int, str] | None:
    """(step, digest) of the weights on which the votes of all members agree by this event; None: it shows nothing."""
    if before.phase not in ("running", "ending"):
        return None
    living, reported = _voted(before, event, gone)
    if len(set(reported.values())) != 1 or reported.keys() != living:
        return None
    return before.committed[0], reported.popitem()[1]


def _voted(before: State, event: m.Event, gone: tuple[Who, ...]) -> tuple[set[Who], dict[Who, str]]:
    """The members whose votes count, and the digests of those that have voted. While the run ends, the votes of those
    that stay are counted when some are lost."""
    votes = dict(before.votes)
    if isinstance(event, m.Vote) and event.result.ok and event.result.at == (before.step_in_flight, before.epoch):
        votes[event.group] = event
    living = {who for who in before.live.items() if before.phase != "ending" or who not in gone}
    return living, {who: votes[who[0]].result.weights_digest for who in living if who[0] in votes}


def _membership(known: Memory, before: State, after: State, done: Step) -> Memory:
    """What changes with members and commits."""
    if after.live is not before.live:
        new = {who for who in after.live.items() if before.live.get(who[0]) != who[1]}
        if new and before.phase != "forming":
            known = known._replace(proven=known.proven | {who for who in new if _is_compared(known, who)})
    if after.learners is not before.learners and known.proven:
        anew = {(group, one.incarnation) for group, one in after.learners.items() if _begins_anew(before, group, one)}
        if not known.proven.isdisjoint(anew):
            known = known._replace(proven=known.proven - anew)
    if before.phase == "forming" and after.phase == "running":
        everybody = frozenset(after.live.items())
        known = known._replace(proven=everybody, independent=everybody, counted=everybody)
    if done.commit is None:
        return known
    voters = frozenset(before.live.items())
    owed, commit = known.owed, done.commit
    if owed is not None and after.phase == "running" and not commit.save and after.live.get(owed[1][0]) != owed[1][1]:
        group, incarnation = owed[1]
        raise Violation(f"group {group}.{incarnation} was to save step {owed[0]}, is lost, and nobody else is asked to")
    if commit.save:
        owed = (commit.step, min(voters))
    counted = voters & known.proven  # who only copied its state before this commit is counted from the next one on
    return known._replace(proven=known.proven | voters, independent=voters, counted=counted, owed=owed)


def _begins_anew(before: State, group: int, now: Learner) -> bool:
    """Whether a learner has another offer than it had, or none, so that what it has of the state is copied anew."""
    old = before.learners.get(group)
    return old is not None and old.incarnation == now.incarnation and old.offer is not None and old.offer != now.offer


def _is_compared(known: Memory, who: Who) -> bool:
    """Whether a learner has reported the agreed weights of a step that it has computed itself."""
    reported = dict(known.agreed)
    return any(one[0] == who and one[3] > one[2] and reported.get(one[3]) == one[4] for one in known.caught)


# ------------------------------------------------------------------------------------------------------------ demands


def _innocent(w: World, known: Memory, done: Step) -> None:
    step = w.brain.state.step_in_flight
    for group, incarnation, why in done.fenced:
        who = (group, incarnation)
        learnt = group in w.brain.state.learners and any(digest != str(t) for t, digest in known.agreed)
        guilty = who in known.damaged or (who, step) in known.erred or (learnt and "computed other weights" in why)
        if not guilty:
            raise Violation(f"innocent group {group}.{incarnation} is fenced: {why}")


def _counts(accept: m.AcceptSave, known: Memory, against: frozenset[tuple[int, str]], after: State) -> None:
    who, right = (accept.group, accept.incarnation), dict(known.agreed).get(accept.step)
    if right == accept.directory:
        return
    contradicted = right is not None and (who, accept.step, accept.directory) in known.reported
    spoken = (accept.step, accept.directory) in against or contradicted
    if after.outcome != "wipe-out" or spoken:
        raise Violation(
            f"a checkpoint of step {accept.step} counts, its weights are {accept.directory!r}, agreed are {right!r}"
        )


def _stopped(w: World, shape: Shape, known: Memory, event: m.Event, done: Step) -> None:
    """Check how the job ends."""
    before, after = w.brain.state, done.after.state
    if after.outcome in ("finished", "left") and before.phase == "ending" and after.saved_step != after.committed[0]:
        raise Violation(f"the job ends before its last step is saved: {done.reason}")
    if after.outcome == "wipe-out":
        if w.offered != NOTHING and w.offered not in w.against and not _is_contradicted(known, w.offered, done):
            raise Violation(f"nothing speaks against the checkpoint of step {w.offered[0]}: {done.reason}")
        if not lacks(w, shape, known, event, done.gone):
            raise Violation(f"the job is wiped out and need not be: {done.reason}")
    if after.outcome == "failed" and before.phase != "forming" and not _may_fail(w, shape, known, event, done):
        raise Violation(f"the job fails without a cause: {done.reason}")


def _is_contradicted(known: Memory, offer: tuple[int, str], done: Step) -> bool:
    """Whether its own writer spoke against a checkpoint, or is found to be wrong by this very record; or votes have
    agreed on other weights of its step, be it a lone one: nobody can tell then, and no wrong weights may count."""
    if dict(known.agreed).get(offer[0], offer[1]) != offer[1]:
        return True
    wrong = {(group, incarnation) for group, incarnation, _ in done.fenced}
    return any(reported[1:] == offer for reported in known.reported) or any(
        wrote[1:] == offer and wrote[0] in wrong for wrote in known.wrote
    )


def lacks(w: World, shape: Shape, known: Memory, event: m.Event, gone: Iterable[Who]) -> str:
    """What a job that goes on without those that are ``gone`` would lack; empty where it could go on."""
    before = w.brain.state
    if shape.state_shards and (lack := shard_judge.lacks(w, frozenset(gone))):
        return lack
    here = {(p.group, w.incarnation(p)): p for p in w.processes}
    there = {who: here[who] for who in before.present.items() if who in here and who not in set(gone)}
    members = {who: p for who, p in there.items() if before.live.get(who[0]) == who[1]}
    if before.phase == "ending":
        return "" if members else "members"
    step = before.committed[0]
    reported = known.independent | {one[0] for one in known.caught if one[3] == step}
    holders = {who for who, p in members.items() if who in known.proven & reported and _holds(before, p)}
    learners = {who for who in there.keys() - members.keys() if _has_caught_up(before, known, who, there[who])}
    if not holders and not learners:
        return "a process that holds the last step"
    unable = {(group, shard) for group, shards in before.unable.items() for shard in shards}
    hosts = set[int]()
    for group, incarnation in there:
        if (group, incarnation) in members or (group, incarnation) in known.ready:
            hosts |= {(group + offset) % shape.groups for offset in before.job.offsets}
    for (group, _), shards in ((who, before.adopted.get(who[0], {})) for who in members):
        hosts |= {
            shard for shard in shards if (group, shard) not in unable and not _reports_unable(event, group, shard)
        }
    for shard in set(range(shape.groups)) - hosts:
        adopters = [
            who for who in holders if (who[0], shard) not in unable and not _reports_unable(event, who[0], shard)
        ]
        if not (shape.adoption and adopters):
            return f"a host of shard {shard}"
    return ""


def _reports_unable(event: m.Event, group: int, shard: int) -> bool:
    return isinstance(event, m.Hosts) and not event.opened and (event.group, event.shard) == (group, shard)


def _holds(before: State, p: Process) -> bool:
    """Whether a member's process is in the state after t*, or holds the result that leads to it."""
    held = p.held.value if p.held else None
    return p.applied == before.committed[0] or (
        p.applied == before.committed[0] - 1 and held is not None and (held.step, held.epoch) == before.committed
    )


def _has_caught_up(before: State, known: Memory, who: Who, p: Process) -> bool:
    """Whether a learner has reported that it holds t* by the offer that it has, in a state that was compared."""
    learner = before.learners.get(who[0])
    if learner is None or learner.offer is None or p.applied != before.committed[0]:
        return False
    mine = [one for one in known.caught if one[:2] == (who, learner.offer.number)]
    reported = dict(known.agreed)
    compared = any(one[3] > one[2] and reported.get(one[3]) == one[4] for one in mine)
    return compared and any(one[3] == before.committed[0] for one in mine)


def _may_fail(w: World, shape: Shape, known: Memory, event: m.Event, done: Step) -> bool:
    """Whether a job may give up because of this event."""
    before = w.brain.state
    lost = done.gone if isinstance(event, m.Lost | m.Hello) else ()
    _, reported = _voted(before, event, lost)
    if len(set(reported.values())) > 1:
        living = [who for who in reported if who in known.counted] or list(reported)
        honest = [who for who in living if reported[who] == str(before.committed[0])]
        return len(living) == 1 or 2 * len(honest) <= len(living)
    if isinstance(event, m.Vote) and event.result.ok:
        return any(_is_open(w, shape, known, piece) for piece in {o[1] for o in known.opinions})
    return isinstance(event, m.Lost) and bool(lacks(w, shape, known, event, done.gone))


def _is_open(w: World, shape: Shape, known: Memory, piece: int) -> bool:
    """Whether the honest opinions on a piece, with those that could still be asked for, are no majority."""
    before, shard = w.brain.state, piece // shape.pieces
    opinions = [(who, checksum) for step, one, who, checksum in known.opinions if one == piece]
    right = {who for who, checksum in opinions if checksum == piece}
    wrong = {who for who, checksum in opinions if checksum != piece}
    if not wrong:
        return False
    hosts = {who for who in before.live.items() if (shard - who[0]) % shape.groups in before.job.offsets}
    asked = {who for who in hosts if who[0] in before.holders} - right - wrong
    return len(right | asked) <= len(wrong)
