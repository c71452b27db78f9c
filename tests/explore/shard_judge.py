"""Checks, as an observer of the whole job, what is decided of state shards, and on which weights groups compute."""

from __future__ import annotations

from collections.abc import Container

from spare_megatron.protocol.view import UNABLE
from tests.explore.brain import Step
from tests.explore.memory import Who
from tests.explore.process import Process, Violation
from tests.explore.shard_process import has_state
from tests.explore.world import World


def decided(w: World, done: Step) -> None:
    """Check a decision of the coordinator: whoever counts as a host has the state of its shard, and a wipe-out is
    declared only where a shard, or every group that holds the last step, is lost.

    Raises:
        Violation: the decision is wrong.
    """
    before, after = w.brain.state, done.after.state
    if after.phase in ("running", "ending") and after.committed[1]:
        here = {(p.group, w.incarnation(p)): p for p in w.processes}
        for host in after.state_hosts:
            p = here.get(host.member)
            if host.counts and p is not None and not has_state(p, host.shard, after.committed):
                raise Violation(f"group {p.name} counts for state shard {host.shard} and has {p.copies}: {done.reason}")
    if after.outcome == "wipe-out" and before.outcome != "wipe-out" and not lacks(w, done.gone):
        raise Violation(f"the job is wiped out and need not be: {done.reason}")


def lacks(w: World, gone: Container[Who]) -> str:
    """What a job that goes on without those that are ``gone`` would lack; empty where it could go on."""
    before = w.brain.state
    here = {(p.group, w.incarnation(p)): p for p in w.processes}
    there = {who: p for who, p in here.items() if before.is_member(who) and who not in gone}
    if not any(group in before.holders for group, _ in there):
        return "a group that holds the last step"
    at, from_checkpoint = before.committed, before.committed[1] == 0
    kept = {
        host.shard
        for host in before.state_hosts
        if host.standing != UNABLE
        and host.member in there
        and ((from_checkpoint and host.counts) or has_state(there[host.member], host.shard, at))
    }
    return "" if len(kept) == before.job.state_shards else "a copy of a state shard"


def computes(p: Process) -> None:
    """Check that a process computes on the weights after the step before.

    Raises:
        Violation: it lacks some of them, or has others.
    """
    assert p.copies is not None, "a job without state shards"
    if any(step != p.known.step - 1 for step in p.copies.weights):
        raise Violation(f"group {p.name} computes step {p.known.step} on the weights after {p.copies.weights}")
