"""Votes and commits: protocol rules 2 (commit), 7 (apply once), 11 (failed votes), 12 (divergence), 14 (end) and 15
(audits).

A step is committed when every live group voted ok in the present epoch with exactly the pieces of its plan, and the
voted sets are disjoint and together the whole batch. The decision is final.
"""

from __future__ import annotations

from collections.abc import Callable

from spare_megatron.config import plural
from spare_megatron.protocol import adoption, audits, ending, membership, offers, saves, state_shards
from spare_megatron.protocol import messages as m
from spare_megatron.protocol.blame import Culprit, culprit
from spare_megatron.protocol.changed_copy import replace
from spare_megatron.protocol.divergence import check_weights, diverged
from spare_megatron.protocol.membership import lose, retry
from spare_megatron.protocol.standing import follows_slowness
from spare_megatron.protocol.state import NO_PLAN, Relief, Retries, Standing, State
from spare_megatron.protocol.state_levelling import levelled
from spare_megatron.protocol.transition import Transition, decide, ignore, minority, proved, stop, with_checkpoint
from spare_megatron.protocol.view import MemberId


def vote(state: State, event: m.Vote) -> Transition:
    """Count one group's vote; commit when it is the last one."""
    group, result = event.group, event.result
    if state.live.get(group) != event.incarnation:
        if group in state.learners and state.learners[group].incarnation == event.incarnation:
            return ignore(state, f"group {group} voted when it had been sent back from the epoch")
        reason = f"group {group} incarnation {event.incarnation} is not in the live set and voted"
        return decide(state, [m.SendFenced(group, event.incarnation, reason)], reason)
    if state.phase not in ("running", "ending"):
        return ignore(state, f"group {group} voted while the job is {state.phase}")
    if result.step != state.step_in_flight:
        return _vote_of_another_step(state, event)
    state = _noted(state, event)
    if state.phase == "ending":
        return ending.vote(state, event)
    if result.corrupt:
        return lose(state, m.Lost((m.Loss(group, event.incarnation, "corrupt", detail=result.detail),)))
    if not result.ok:
        return _failed_vote(state, event)
    if result.epoch != state.epoch:
        return ignore(state, f"group {group} voted for epoch {result.epoch}, the epoch is {state.epoch}")
    if waiting := state_shards.uncounted(state):
        return ignore(state, f"group {group} voted while no host counts for {state_shards.named(waiting)}")
    if group not in state.holders:
        return ignore(state, f"group {group} voted before it held the state of step {state.committed[0]}")
    planned = [piece for segment in state.segments_of(group) for piece in segment]
    if list(result.pieces) != planned:
        detail = (
            f"voted {plural.counted(len(result.pieces), 'piece')} for step {result.step} which are not the "
            f"{len(planned)} of its plan"
        )
        return lose(state, m.Lost((m.Loss(group, event.incarnation, "diverged", detail=detail),)))
    unlike = audits.unlike_the_plan(state, event) or state_shards.unlike_the_hosts(state, event)
    if unlike:
        return lose(state, m.Lost((m.Loss(group, event.incarnation, "diverged", detail=unlike),)))
    counted = replace(state, votes={**state.votes, group: event})
    if len(counted.votes) < len(counted.live):
        return ignore(counted, f"group {group} voted ok, {len(counted.votes)} of {len(counted.live)}")
    return _all_ok(counted)


def all_voted(state: State, event: m.AllVoted) -> Transition:
    """Take the ok votes of all live groups for their plans at once."""
    if state.phase != "running" or (event.step, event.epoch) != (state.step_in_flight, state.epoch):
        return ignore(state, f"all voted for step {event.step} in epoch {event.epoch}, which is not in flight")
    if len(state.holders) < len(state.live):
        return ignore(state, "a joiner has not sent Applied yet")
    if state.disputes or any(state.audits.values()) or state.state_hosts:
        return ignore(state, f"the votes of step {event.step} are to be compared: each must come by itself")
    return _with_proof(state, lambda agreed: _commit(agreed, event.weights_digest), event.weights_digest)


def _noted(state: State, event: m.Vote) -> State:
    """The state that remembers what the group that saves t* says of the weights after t*."""
    member, digest = (event.group, event.incarnation), event.result.weights_digest
    saves_now = member == state.saver or (state.phase == "ending" and event.group == saves.saver(state.live))
    if not saves_now or not digest or event.result.epoch != state.epoch or state.reported.get(member) == digest:
        return state
    return replace(state, reported={**state.reported, member: digest})


def applied(state: State, event: m.Applied) -> Transition:
    """At the end of the run: a member has done all that is asked of it."""
    group = event.group
    if state.live.get(group) != event.incarnation:
        return ignore(state, f"group {group} incarnation {event.incarnation} is not in the live set")
    if event.step != state.committed[0] or state.phase != "ending":
        return ignore(state, f"group {group} is done with step {event.step}, which is not the last")
    return ending.applied(state, event)


def _vote_of_another_step(state: State, event: m.Vote) -> Transition:
    result = event.result
    if result.at == state.committed:
        reason = f"group {event.group} voted for step {result.step} again: it missed the commit"
        return decide(state, [m.SendView(state.view_of(event.group))], reason)
    return ignore(state, f"group {event.group} voted for step {result.step}, {state.step_in_flight} is in flight")


def standstill(state: State, event: m.Standstill) -> Transition:
    """All groups wait for each other: the attempt has failed although nobody voted so (rule 11)."""
    if state.phase != "running" or event.epoch != state.epoch:
        return ignore(state, f"{event.detail}; that was in epoch {event.epoch} of a job that is {state.phase}")
    retries = replace(state.retries, failures=state.retries.failures + 1)
    return retry(state, retries, event.detail, event.failing_s)


def _failed_vote(state: State, event: m.Vote) -> Transition:
    """A group could not reduce: fence the group that explains it, else try again (rule 11)."""
    result, old = event.result, state.retries
    current = result.epoch == state.epoch
    why = f"group {event.group} failed step {result.step} in epoch {result.epoch}: {result.detail or 'no reason given'}"
    if result.epoch < old.since:
        return ignore(state, f"{why}; that epoch is over, joiners were waited for in it or groups have come since")
    waited_for = membership.waited_for(state) if current else []
    if waited_for:
        return membership.send_back(state, waited_for, {event.group}, f"{why}; joiners were waited for")
    retries = replace(old, failures=old.failures + current, evidence=old.evidence.after(event))
    patient = event.failing_s >= state.job.heartbeat_timeout_s
    found = culprit(retries.evidence, state.live, retries.failures, patient)
    fenced = None if found is None else _fence_culprit(state, found, retries, event.failing_s, why)
    if fenced is not None:
        return fenced
    if not current:
        kept = replace(state, retries=retries)
        return ignore(kept, f"group {event.group} failed in epoch {result.epoch}, which is over; what it saw counts")
    return retry(state, retries, why, event.failing_s)


def _fence_culprit(state: State, found: Culprit, retries: Retries, failing_s: float, why: str) -> Transition | None:
    """Lose the culprit; None where that costs too much, because trying the step again is better then."""
    detail = f"{found.why}; failed attempts at step {state.step_in_flight}: {retries.failures}, the last one: {why}"
    outcome = lose(state, m.Lost((m.Loss(found.group, state.live[found.group], "blamed", detail=detail),)))
    return None if membership.costs_too_much(state, outcome[0], retries, failing_s) else outcome


def _all_ok(state: State) -> Transition:
    """Every live group voted ok (rule 12)."""
    return check_weights(state, _fence) or _with_proof(state, _same_weights, state.voted_weights)


def _with_proof(state: State, follows: Callable[[State], Transition], digest: str) -> Transition:
    """All votes agree on the ``digest`` of the weights that the step began with: let a checkpoint of these weights
    count if its group is one of those that voted, then go on with ``follows``."""
    compared, accepts, counts = proved(state, digest)
    after, decision = follows(compared)
    if not accepts:
        return after, decision
    if len(state.votes) == 1 and not state.votes.keys() <= after.live.keys():
        return follows(state)  # a vote alone compares nothing, and less where its group is found to be wrong by it
    actions = m.Deferred(lambda: (*accepts, *decision.actions))
    return after, replace(decision, actions=actions, reason=f"{counts}; {decision.reason}")


def _same_weights(state: State) -> Transition:
    """Compare the checksums of audited pieces, then the reduced results, then commit."""
    verdict = audits.judge(state)
    if verdict.wrong:
        return _fence_wrong(state, verdict)
    if verdict.open:
        return membership.ask(state, verdict)
    suspects = minority({g: v.result.result_digest for g, v in state.votes.items()}, lambda group: True)
    if suspects == frozenset():
        _check_partition(state)
        return _commit(state, next((vote.result.weights_digest for vote in state.votes.values()), ""))
    if not state.retries.result_mismatches:
        retries = replace(state.retries, failures=state.retries.failures + 1, result_mismatches=1)
        return retry(state, retries, f"the reduced results of step {state.step_in_flight} differ between groups", 0.0)
    if suspects is None:
        reason = f"the reduced results of step {state.step_in_flight} differ twice and no majority agrees"
        return stop(state, "failed", with_checkpoint(state, reason))
    return _fence(state, diverged(state, suspects, f"reduced result of step {state.step_in_flight} differs"))


def _fence(state: State, losses: tuple[m.Loss, ...]) -> Transition:
    return lose(state, m.Lost(losses))


def _fence_wrong(state: State, verdict: audits.Verdict) -> Transition:
    """Lose the groups whose arithmetic is wrong; the checksums voted for disputed pieces are kept for this step."""
    losses = (
        m.Loss(group, state.live[group], "corrupt", position, detail)
        for group, (position, detail) in sorted(verdict.wrong.items())
    )
    return _fence(replace(state, disputes=verdict.opinions), tuple(losses))


def _check_partition(state: State) -> None:
    """Assert that the voted sets are disjoint and together the batch, from the votes themselves and not from the
    plan."""
    seen = bytearray(state.job.num_groups * state.job.pieces_per_shard)
    total = 0
    for ballot in state.votes.values():
        for piece in ballot.result.pieces:
            seen[piece] = 1
        total += len(ballot.result.pieces)
    assert total == len(seen) == sum(seen), f"votes of step {state.step_in_flight} are no partition of the batch"


def _commit(state: State, digest: str) -> Transition:
    """Commit the step in flight. The steady-state assignment becomes the plan of the next step in the same record.
    ``digest``: of the weights that the step began with, on which all votes agree."""
    step, voters = state.step_in_flight, tuple(sorted(state.live))
    saver = saves.saver(voters), state.live[saves.saver(voters)]
    ends = step >= state.job.last_step or bool(state.leave)
    hosts, state = state.state_hosts, state_shards.compared(state)
    state, leaves = (state, ()) if ends else _without_leaving(state)
    state, unlike = offers.disproved(state, digest)
    joining = [] if ends else offers.admissible(state, digest)
    state, fences = offers.struck_off(state, unlike)
    endangered = saves.endangered(state)
    save = 0 if ends else saves.order(state, endangered)
    emergency = not ends and saves.is_emergency(state, endangered)
    by_speed = state.share_anew and not ends and not follows_slowness(state)
    assert state.standing is not None, "a running job has a steady-state assignment"
    # Holders are members: where there are as many holders as members, the set can be kept as it is.
    holders = state.holders if len(state.holders) == len(state.live) else frozenset(state.live)
    after = replace(
        state,
        phase="ending" if ends else "running",
        committed=(step, state.epoch),
        holders=holders,
        untried=frozenset(),
        independent=_independent(state),
        reported={},
        accused=frozenset(),
        votes={},
        retries=Retries(),
        plan=NO_PLAN if ends else state.standing.plan,
        save_now=False,
        save_step=step if save == step else state.save_step,
        saver=saver if save else state.saver,
        save=save,
        endangered=endangered,
        audits={} if ends else audits.draw(state.job, state.where, state.standing.assignment, state.live, step + 1),
        disputes={},
        relief=Relief(),
        share_anew=False,
        digests=(*state.digests, (step - 1, digest))[-state.job.results_kept - 1 :],
    )
    after = offers.ended(after) if ends else offers.offered(after)
    reported = tuple((group, pieces[0]) for group, pieces in after.audits.items())
    serves = tuple(sorted(after.serves.items()))
    commit = m.SendCommit(voters, step, state.epoch, ends, reported, save, serves=serves)
    actions: list[m.Action] = [commit, *leaves, *fences]
    reason = f"step {step} is committed in epoch {state.epoch} by {plural.counted(len(voters), 'group')}"
    if emergency:
        one_of = "one of " if len(endangered) > 1 else ""
        reason += f"; it is saved, because the loss of {one_of}{audits.name_members(endangered)} could end the job"
    if unlike:
        who = audits.name_groups(sorted(unlike))
        reason += f"; the weights that {who} computed after step {step - 1} are others: its offer has ended"
    moves = ""
    if not (ends or save or leaves):
        after, moves = levelled(after)
    if not ends and not moves and state_shards.renewed(after).state_hosts != hosts:
        moves = "hosts of state shards change"
    if not (joining or leaves or by_speed or moves):
        learners = [m.SendView(after.view_of(group)) for group in sorted(after.learners)]
        return decide(after, [*actions, *learners], reason)
    left = [fence.group for fence in leaves]
    changed, decision = membership.change_members(after, joining, left, reason, moves)
    return decide(changed, m.Deferred(lambda: (*actions, *decision.actions)), decision.reason)


def _independent(state: State) -> frozenset[MemberId]:
    """The members whose own weights may be counted from the commit of the step in flight on. What a joiner of the last
    resort has only copied proves nothing of the rest of its state, so it is counted from the next commit on."""
    if not state.untried:
        return frozenset(state.live.items())
    return frozenset(member for member in state.live.items() if member[0] not in state.untried)


def _without_leaving(state: State) -> tuple[State, tuple[m.SendFenced, ...]]:
    """The state at a commit without the members that leave with it, and who is notified. They have no piece in later
    steps; offers end in which they are donors."""
    assert state.standing is not None, "a running job has a steady-state assignment"
    drawn = state.standing.assignment
    idle = [group for group in state.drained if group in state.live and not drawn.alive[group]]
    out = sorted(set(idle) - state_shards.needed(state, idle))
    if not out:
        return state, ()
    gone = {(group, state.live[group]) for group in out}
    learners, _ = offers.without_donors(state.learners, gone)
    live = {group: incarnation for group, incarnation in state.live.items() if group not in out}
    standing = Standing(drawn, tuple(sorted(live)))
    reported = tuple(m.SendFenced(group, state.live[group], f"group {group} is drained") for group in out)
    slowness = {group: known for group, known in state.slowness.items() if group in live}
    after = replace(state, live=live, holders=state.holders - set(out), learners=learners, standing=standing)
    return adoption.remaining(replace(after, slowness=slowness), out), reported
