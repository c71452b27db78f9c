"""Checks what must hold after every event: the section 'What must always hold' of docs/protocol.md, as code.

``check`` is called by the tests and by the simulator with the state before and after one event. It raises
:class:`InvariantError` with the figures; it never repairs anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

from spare_megatron.protocol import messages as m
from spare_megatron.protocol import state_shards
from spare_megatron.protocol.assign_types import USUAL
from spare_megatron.protocol.audits import padded
from spare_megatron.protocol.standing import follows_slowness, leaving
from spare_megatron.protocol.state import State
from spare_megatron.protocol.view import UNABLE, MemberId, Offer


class InvariantError(AssertionError):
    """An invariant does not hold: a bug in the protocol machine, never a user's fault."""


def check(before: State, event: m.Event, after: State, decision: m.Decision) -> None:
    """Check every invariant that one transition can violate.

    Raises:
        InvariantError: naming the invariant and the values.
    """
    if not decision.reason:
        raise InvariantError(f"{type(event).__name__} led to a decision without a reason")
    _membership(before, after)
    _commits(before, event, after, decision)
    _saves(before, event, after, decision)
    if after.phase == "running":
        _plans(after)
        _votes(after)
        _growth(before, event, after)
        _relief(before, after)
        _adoption(before, event, after)
        _audits(before, after)
    _views(after, decision)
    _joiners(event, after)
    _offers(before, after, decision)
    _drain_requests(before, event, after)
    _drained(before, after)
    _standing(before, after)
    if after.phase in ("running", "ending") and after.job.state_shards:
        _state_hosts(before, after)


def _offers(before: State, after: State, decision: m.Decision) -> None:
    """Who holds no state has a learner's place; offers are by members that hold the state, of the last commit, and all
    the record that makes them sends them to their donors: so these receive them before they apply the next step."""
    if after.phase not in ("running", "ending"):
        return
    joiners = after.joiners
    if after.live.keys() - after.holders != joiners:
        raise InvariantError(f"members {sorted(after.live.keys() - after.holders)} hold no state, joiners {joiners}")
    known = {offer.number for offer in before.offers}
    for group, learner in after.learners.items():
        stateless = learner.offer is None and not after.job.state_shards
        if group in joiners and (learner.incarnation != after.live[group] or stateless):
            raise InvariantError(f"joiner {group} has no offer, or is another incarnation than the member")
        if group not in joiners and (group in after.live or any(after.segments_of(group))):
            raise InvariantError(f"learner {group} has a part in the step")
    notified = _asked_to_serve(decision)
    commits = any(isinstance(action, m.SendCommit) for action in decision.actions)
    for offer in after.offers:
        if any(after.live.get(group) != inc or group not in after.holders for group, inc in offer.donors):
            raise InvariantError(f"a donor of offer {offer.number} is gone or holds no state")
        if not offer.donors or offer.step > after.committed[0]:
            raise InvariantError(f"offer {offer.number} has no donor, or is of a step that is not committed")
        is_new = offer.number not in known
        if is_new and (offer.step != after.committed[0] or offer.number <= before.offers_made):
            raise InvariantError(f"offer {offer.number} is new, and not of the last commit or not numbered anew")
        if (is_new or commits) and any((group, offer.number) not in notified for group, _ in offer.donors):
            raise InvariantError(f"offer {offer.number} is made or kept where its donors need not learn of it")


def _asked_to_serve(decision: m.Decision) -> set[tuple[int, int]]:
    """(group, number of an offer) of what the decision's commit and views list."""
    listed = set[tuple[int, int]]()
    for action in decision.actions:
        if isinstance(action, m.SendCommit):
            listed |= {(group, offer.number) for group, offers in action.serves for offer in offers}
        elif isinstance(action, m.SendView):
            listed |= {(action.view.group, offer.number) for offer in action.view.serves}
    return listed


def _joiners(event: m.Event, after: State) -> None:
    """Nobody waits for a joiner longer than its grace (rule 13): when it is over, no joiner without a piece is left."""
    if not isinstance(event, m.JoinersLate) or event.epoch != after.epoch or after.phase != "running":
        return
    waited = [g for g in after.joiners if not any(after.segments_of(g))]
    if waited:
        raise InvariantError(f"the grace of epoch {event.epoch} is over and joiners {sorted(waited)} are waited for")


def _drain_requests(before: State, event: m.Event, after: State) -> None:
    """The launcher takes no wish back but its own, and an operator's wish is the operator's (rule 22)."""
    if not after.drained_for_now <= after.drained:
        raise InvariantError(f"{sorted(after.drained_for_now)} are to leave for now, and not at all")
    if not isinstance(event, m.DrainRequested) or (event.undo and not event.for_now):
        return
    before_it, lasting = before.drained - before.drained_for_now, after.drained - after.drained_for_now
    if event.for_now and not before_it <= lasting:
        raise InvariantError(f"of {sorted(before_it)}, which an operator has drained, some are so no more")
    if not event.for_now and after.drained.issuperset(event.groups) and not lasting.issuperset(event.groups):
        raise InvariantError(f"an operator has drained {event.groups}, and the launcher may take that back")


def _drained(before: State, after: State) -> None:
    """Who leaves on request had nothing to do in the step that begins, and nobody's shard is bare without it; who stays
    is needed (rule 22)."""
    if after.phase != "running" or before.phase != "running" or after.committed == before.committed:
        return
    for group in before.live.keys() - after.live.keys():
        if group not in before.drained or before.standing_of(group):
            raise InvariantError(f"group {group} leaves with a commit, and has to compute or was not asked to")
    bare = set(range(after.job.num_groups)) - {s for g in after.live.keys() - after.drained for s in _stack(after, g)}
    for group in after.drained & before.live.keys() & after.live.keys():
        stays = group not in before.drained or group in state_shards.needed(after, [group])
        if not stays and not before.standing_of(group) and not bare & _stack(after, group):
            raise InvariantError(f"group {group} is to leave, has nothing to do and is still a member")


def _standing(before: State, after: State) -> None:
    """The steady-state assignment changes only with an epoch, whose views say so. Slowness is of members, and what was
    measured is in the steady-state assignment when a commit was to share later steps out by it (rule 24)."""
    if after.phase != "running" or before.phase != "running" or before.standing is None or after.standing is None:
        return
    if after.standing.assignment is not before.standing.assignment and after.epoch == before.epoch:
        raise InvariantError(f"the steady-state assignment changed inside epoch {after.epoch}")
    if not after.slowness.keys() <= after.live.keys() or any(known <= USUAL for known in after.slowness.values()):
        raise InvariantError(f"slowness {dict(after.slowness)} is not of slow members {sorted(after.live)}")
    if after.committed == before.committed or not before.share_anew:
        return
    if after.share_anew or not follows_slowness(after):
        raise InvariantError(f"step {after.committed[0]} was committed, and later steps are not shared out by speed")


def _state_hosts(before: State, after: State) -> None:
    """Hosts of state shards are members, and change only with an epoch. A new host begins to count by a commit, or
    where no other host counts. Each shard has a host that counts, or new ones that may have its state; nothing is
    committed while none counts, and nobody leaves by whom a shard would have too few."""
    shards, members = range(after.job.state_shards), set(after.live.items())
    pairs = [(host.shard, host.group) for host in after.state_hosts]
    if pairs != sorted(set(pairs)) or any(host.member not in members for host in after.state_hosts):
        raise InvariantError(f"{after.state_hosts} are not hosts among the members {sorted(members)}, one by one")
    counting = {(host.shard, host.member) for host in after.state_hosts if host.counts}
    saved = after.phase == "ending" and after.saved_step == after.committed[0]
    if not saved and (lost := state_shards.lost(after)):
        raise InvariantError(f"the job goes on, and no copy is left of {state_shards.named(lost)}")
    for host in after.state_hosts:
        if host.donor is not None and ((host.shard, host.donor) not in counting or host.standing != "new"):
            raise InvariantError(f"{host} has a donor that is no counting host, or needs none")
        if host.donor is not None and not 0 <= host.step <= after.committed[0]:
            raise InvariantError(f"{host} is offered a state that is not committed")
    commits = after.committed[0] > before.committed[0]
    if commits and state_shards.uncounted(before):
        raise InvariantError(f"step {after.committed[0]} is committed without a counting host of each state shard")
    if before.phase != "running" or after.phase != "running":
        return
    old = {(host.shard, host.member): host for host in before.state_hosts}
    if after.epoch == before.epoch:
        named = [(host.shard, host.member, host.counts) for host in after.state_hosts]
        if named != [(host.shard, host.member, host.counts) for host in before.state_hosts]:
            raise InvariantError(f"hosts of state shards changed inside epoch {after.epoch}")
        return
    still = {host.shard for host in before.state_hosts if host.counts and host.member in members}
    for shard, member in counting:
        known = old.get((shard, member))
        if known is None or not (known.counts or commits or shard not in still):
            raise InvariantError(f"group {member[0]} counts for state shard {shard} without a comparison")
    out = leaving(after, after.live)
    if new := [host for host in after.state_hosts if host.group in out and (host.shard, host.member) not in old]:
        raise InvariantError(f"{new} are to leave, and have just been named")
    able = after.live.keys() - after.drained
    unable = state_shards.unable_groups(after)
    for shard in shards:
        there = {group for at, group in pairs if at == shard} & able - unable[shard]
        enough = min(after.job.state_copies, len(able - unable[shard]))
        if shard not in state_shards.uncounted(after) and len(there) < enough:
            raise InvariantError(f"state shard {shard} has hosts {sorted(there)} among {sorted(able)} in a new epoch")
    here = able & before.live.keys()  # who joins now cannot have a copy yet
    for host in before.state_hosts if commits else ():
        enough = min(after.job.state_copies, len(here - unable[host.shard]))
        copies = sum(at == host.shard for at, _ in counting)
        if host.counts and host.member not in members and copies < enough:
            raise InvariantError(f"group {host.group} leaves, and state shard {host.shard} has {copies} copies")
    _struck_off(before, after, counting, commits=commits)


def _struck_off(before: State, after: State, counting: set[tuple[int, MemberId]], *, commits: bool) -> None:
    """A member is struck off as a host by a commit only, which leaves the shard with all its copies and the member with
    no fewer shards than any of those that keep it, and while nothing else is due."""
    kept = Counter(host.group for host in after.state_hosts if host.standing != UNABLE)
    there = {(host.shard, host.member) for host in after.state_hosts}
    for host in before.state_hosts:
        if (host.shard, host.member) in there or not after.is_member(host.member):
            continue
        copies = [group for shard, (group, _) in counting if shard == host.shard]
        if not commits or len(copies) < after.job.state_copies:
            raise InvariantError(f"group {host.group} is struck off, and state shard {host.shard} has hosts {copies}")
        if after.learners or after.save or sum(one.is_new for one in after.state_hosts) > 1:
            raise InvariantError(f"group {host.group} is struck off while something is due")
        if max(kept[group] for group in copies) > kept[host.group] + 1:
            raise InvariantError(f"group {host.group} is struck off and keeps fewer than another host: {dict(kept)}")


def _stack(state: State, group: int) -> set[int]:
    return set(state.where.stack_of(group))


def _membership(before: State, after: State) -> None:
    if after.epoch < before.epoch:
        raise InvariantError(f"epoch went back from {before.epoch} to {after.epoch}")
    changed = before.live != after.live and after.phase == before.phase == "running"
    if changed and after.epoch != before.epoch + 1:
        raise InvariantError(f"the live set changed and the epoch went from {before.epoch} to {after.epoch}")
    for group, incarnation in after.live.items():
        if after.highest.get(group, -1) < incarnation:
            raise InvariantError(
                f"group {group} lives as {incarnation}, the highest known is {after.highest.get(group)}"
            )
    for group, known in before.highest.items():
        if after.highest.get(group, -1) < known:
            raise InvariantError(f"the highest incarnation of group {group} went back from {known}")
    if not after.holders <= after.live.keys() and after.phase in ("running", "ending"):
        raise InvariantError(f"holders {sorted(after.holders)} are not all in the live set {sorted(after.live)}")
    if after.phase == "running" and not after.holders:
        raise InvariantError("no live group holds the last committed state")


def _commits(before: State, event: m.Event, after: State, decision: m.Decision) -> None:
    sent = [a for a in decision.actions if isinstance(a, m.SendCommit)]
    if isinstance(event, m.Opened):
        if sent:
            raise InvariantError("opening a job committed a step")
        return
    advanced = after.committed[0] - before.committed[0]
    if advanced not in (0, 1) or len(sent) != advanced:
        raise InvariantError(
            f"the last commit went from {before.committed[0]} to {after.committed[0]} with {len(sent)} commits sent"
        )
    if not advanced:
        return
    commit = sent[0]
    if (commit.step, commit.epoch) != after.committed or commit.epoch != before.epoch:
        raise InvariantError(
            f"commit {commit.step} of epoch {commit.epoch} is not {after.committed} in epoch {before.epoch}"
        )
    if set(commit.groups) != set(before.live):
        raise InvariantError(f"commit went to {commit.groups}, the live set was {sorted(before.live)}")
    if not before.live.keys() <= before.holders:
        raise InvariantError(f"step {commit.step} was committed with members that did not hold the state before it")
    _partition(before, [before.segments_of(g) for g in before.live])
    _agreement(before, event)
    votes = _with(before, event)
    for group in after.live.keys() - before.live.keys():
        learner = after.learners.get(group)
        if learner is not None and learner.ready and after.job.state_shards and not any(after.segments_of(group)):
            continue
        if learner is None or learner.applied != before.committed[0] or any(after.segments_of(group)):
            raise InvariantError(f"group {group} joins as a holder, with a piece, or not after step {before.committed}")
        if any(vote.result.weights_digest for vote in votes.values()) and not learner.proved:
            raise InvariantError(f"group {group} joins and its state was never compared")


def _saves(before: State, event: m.Event, after: State, decision: m.Decision) -> None:
    """A checkpoint counts when a member wrote it and votes have compared its weights; at a wipe-out also one that
    nobody could compare, unless votes spoke against its group (rule 8)."""
    for action in decision.actions:
        if not isinstance(action, m.AcceptSave):
            continue
        key = (action.group, action.incarnation)
        if len(_with(before, event)) < 2 and key in _accused(before, event, after):
            raise InvariantError(f"a checkpoint of group {action.group} counts although votes spoke against the group")
        if after.outcome == "wipe-out":
            continue
        if before.live.get(action.group) != action.incarnation:
            raise InvariantError(f"a checkpoint of group {action.group} counts, which is no member")
        if action.step < before.committed[0] or isinstance(event, m.AllVoted):
            continue
        votes = _with(before, event)
        digests = {
            votes[g].result.weights_digest if g in votes else None for g in before.live.keys() & after.live.keys()
        }
        if len(digests) != 1 or None in digests:
            raise InvariantError(f"the checkpoint of step {action.step} counts before its weights were compared")


def _accused(before: State, event: m.Event, after: State) -> set[tuple[int, int]]:
    """(group, incarnation) of those that votes spoke against: at a wipe-out, the groups that a vote's own record
    removes. (A group that is fenced for its links is never removed by a record that ends the job.)"""
    if not isinstance(event, m.Vote) or after.outcome != "wipe-out":
        return set()
    return {(group, incarnation) for group, incarnation in before.live.items() if group not in after.live}


def _with(before: State, event: m.Event) -> Mapping[int, m.Vote]:
    """The votes before an event, with the event where it is one."""
    return {**before.votes, event.group: event} if isinstance(event, m.Vote) else before.votes


def _agreement(before: State, event: m.Event) -> None:
    """No step is committed while two of its groups have different gradients of one piece (rule 15)."""
    votes = _with(before, event)
    found: dict[int, dict[int, int]] = {}
    for group, vote in votes.items():
        for piece, checksum in (*vote.result.checksums, *vote.result.audits):
            known = found.setdefault(piece, {})
            known[group] = checksum
            if len(set(known.values())) > 1:
                raise InvariantError(
                    f"step {before.step_in_flight} was committed although groups {sorted(known)} found different "
                    f"gradients of piece {piece}"
                )


def _partition(state: State, plans: Sequence[Sequence[Sequence[int]]]) -> None:
    pieces = sorted(chain.from_iterable(chain.from_iterable(plans)))
    if pieces != list(range(state.job.num_groups * state.job.pieces_per_shard)):
        raise InvariantError(
            f"the plans of step {state.step_in_flight} in epoch {state.epoch} are no partition of the batch"
        )


def _plans(state: State) -> None:
    """A live host of its shard computes each piece once, in this step and in the steps after it."""
    plans = {group: state.segments_of(group) for group in state.live}
    _partition(state, list(plans.values()))
    _partition(state, [(state.standing_of(g),) for g in state.live])
    if set(state.plan) != set(state.live):
        raise InvariantError(f"plans for {sorted(state.plan)}, live are {sorted(state.live)}")
    lengths = [sum(map(len, plans.get(group, ()))) for group in range(state.job.num_groups)]
    if state.plan.loads().tolist() != lengths:
        raise InvariantError(f"groups are counted as {state.plan.loads().tolist()} pieces, their plans have {lengths}")
    for group, segments in plans.items():
        strange = sorted(_shards(state, chain.from_iterable(segments)).difference(state.where.stack_of(group)))
        if strange:
            raise InvariantError(f"group {group} is to compute shards {strange} which it does not host")


def _hosts(state: State) -> dict[int, set[int]]:
    """Shard -> live groups that host it."""
    hosts: dict[int, set[int]] = {shard: set() for shard in range(state.job.num_groups)}
    for group in state.live:
        for shard in state.where.stack_of(group):
            hosts[shard].add(group)
    return hosts


def _shards(state: State, pieces: Iterable[int]) -> set[int]:
    each = state.job.pieces_per_shard
    return {piece // each for piece in pieces}


def _votes(state: State) -> None:
    for group, vote in state.votes.items():
        if state.live.get(group) != vote.incarnation or not vote.result.ok:
            raise InvariantError(f"a vote of group {group} is counted which is not a live member's ok")
        if vote.result.at != (state.step_in_flight, state.epoch):
            raise InvariantError(f"a vote for {vote.result.at} counts in {(state.step_in_flight, state.epoch)}")
        if list(vote.result.pieces) != [p for segment in state.segments_of(group) for p in segment]:
            raise InvariantError(f"the vote of group {group} has other pieces than its plan")


def _offer_of(state: State, group: int) -> Offer | None:
    return state.learners[group].offer if group in state.learners else None


def _growth(before: State, event: m.Event, after: State) -> None:
    """Inside a step a survivor's plan only grows (rule 4), and only loses what the group has given back (rule 21) or
    cannot open (rule 23)."""
    if before.phase != "running" or before.committed != after.committed:
        return
    for group in before.live.keys() & after.live.keys():
        if before.live[group] != after.live[group]:
            continue
        given = frozenset(before.relief.given.get(group, ()))
        if isinstance(event, m.GaveBack) and event.group == group:
            given = given.union(event.pieces)
        old = before.segments_of(group)
        new = old if after.plan is before.plan else after.segments_of(group)
        if not (given and after.epoch > before.epoch and group not in after.relief.asked):
            given = frozenset()
        given = given.union(_shut(before, event, group))
        if given:
            old = tuple(tuple(piece for piece in segment if piece not in given) for segment in old)
        anew = group in after.learners and after.learners[group].offer != _offer_of(before, group)
        if anew:
            continue
        if new[: len(old)] != old:
            raise InvariantError(
                f"the plan of group {group} in step {after.step_in_flight} is no longer a prefix of the new one"
            )
        if len(new) > len(old) + 1:
            raise InvariantError(f"the plan of group {group} grew by {len(new) - len(old)} segments in one epoch")
        if group not in after.holders:
            added = _shards(after, [piece for segment in new[len(old) :] for piece in segment])
            hosts = _hosts(after) if added else {}
            if any(hosts[shard] & after.holders for shard in added):
                raise InvariantError(f"joiner {group} got shards {sorted(added)} although a holder hosts one of them")


def _shut(before: State, event: m.Event, group: int) -> tuple[int, ...]:
    """The pieces of a shard that the group cannot open."""
    if not isinstance(event, m.Hosts) or event.group != group or event.opened:
        return ()
    if event.shard not in before.adopted.get(group, {}):
        return ()
    return tuple(p for p in before.plan.pieces(group) if p // before.job.pieces_per_shard == event.shard)


def _adoption(before: State, event: m.Event, after: State) -> None:
    """Only members that hold the state have adopted shards, which they did not host; a group that cannot open one is
    never its host again; and a shard is adopted only where it had no host (rule 23)."""
    pairs = {(shard, group) for group, shards in after.adopted.items() for shard in shards}
    if set(after.where.adopted) != pairs:
        raise InvariantError(f"the placement has adopted {after.where.adopted}, the groups {sorted(pairs)}")
    if not after.adopted.keys() | after.unable.keys() <= after.live.keys() or not after.adopted.keys() <= after.holders:
        raise InvariantError(f"{sorted(pairs)} are adopted, members are {sorted(after.live)}")
    for shard, group in pairs:
        if shard in after.unable.get(group, ()):
            raise InvariantError(f"group {group} hosts shard {shard}, which it could not open")
        if before.phase == "running" and shard not in before.adopted.get(group, {}):
            there = [
                g for g in before.where.hosts_of(shard) if g in before.live and before.live[g] == after.live.get(g)
            ]
            still = [g for g in there if not (isinstance(event, m.Hosts) and (g, shard) == (event.group, event.shard))]
            if still:
                raise InvariantError(f"group {group} adopts shard {shard}, which groups {still} host")


def _relief(before: State, after: State) -> None:
    """Only holders are asked, who may have begun nothing of what they give; an answer waits for those of the others in
    the giver's plan, and what is asked of a group is asked until its answer has moved pieces, or the step has ended."""
    relief = after.relief
    if not relief.asked.keys() <= after.holders or not relief.given.keys() <= relief.asked.keys():
        raise InvariantError(
            f"{sorted(relief.asked)} are asked and {sorted(relief.given)} have answered, holders are "
            f"{sorted(after.holders)}"
        )
    if relief.asked and relief.given.keys() == relief.asked.keys():
        raise InvariantError("all that were asked have answered, and nothing moves")
    for group, pieces in relief.given.items():
        if not {piece for segment in after.segments_of(group) for piece in segment}.issuperset(pieces):
            raise InvariantError(f"group {group} gave pieces back that are not in its plan")
    if before.committed == after.committed and after.epoch == before.epoch and before.phase == "running":
        lost = before.relief.asked.keys() - relief.asked.keys()
        if any(before.relief.given.get(group) for group in lost):
            raise InvariantError(f"groups {sorted(lost)} are asked no more, and what they gave is in their plans")


def _audits(before: State, after: State) -> None:
    """Live hosts of the shards do the audits, and those of the segments that a group was notified of do not change
    inside a step."""
    hosts = _hosts(after) if after.audits else {}
    for group, audits in after.audits.items():
        if group not in after.live or len(audits) > len(after.segments_of(group)):
            raise InvariantError(f"group {group} is to audit in {len(audits)} segments of a plan that it does not have")
        strange = sorted(s for s in _shards(after, [p for part in audits for p in part]) if group not in hosts[s])
        if strange:
            raise InvariantError(f"group {group} is to audit shards {strange} which it does not host")
    if before.phase != "running" or before.committed != after.committed:
        return
    for group in before.live.keys() & after.live.keys():
        notified = len(before.segments_of(group))
        old, new = padded(before.audits.get(group, ()), notified), padded(after.audits.get(group, ()), notified)
        if old != new[:notified]:
            raise InvariantError(f"group {group} was notified of other audits in a segment that it may have run")


def _views(after: State, decision: m.Decision) -> None:
    for action in decision.actions:
        if isinstance(action, m.SendView) and action.view.epoch != after.epoch:
            raise InvariantError(f"a view of epoch {action.view.epoch} was sent in epoch {after.epoch}")
