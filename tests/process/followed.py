"""Follows the journal of a real run with the simulator's events, and compares the decisions.

The protocol machine gets the bulk events that the simulator uses (all Hellos as one event, all votes as one event),
with the losses, returns, offers and failed votes of the journal. Every decision, and the plans after it, must be those
of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from spare_megatron.coordinator.journal import JournalError, Record, read
from spare_megatron.protocol import messages as m
from spare_megatron.protocol.machine import State, initial_state, step


@dataclass(frozen=True)
class Followed:
    """Numbers of what was compared."""

    commits: int
    losses: int
    admissions: int
    """Groups that commits made members."""
    actions: int


def follow(path: Path) -> Followed:
    """Follow a journal; JournalError where the simulator's events lead to another decision than the run's."""
    real, simulated = initial_state(), initial_state()
    commits = lost = admitted = actions = 0
    arrived: list[m.Hello] = []
    for record in read(path):
        before, event = real, record.event
        real, _ = step(real, event)
        if isinstance(event, m.Hello) and before.phase == "forming":
            arrived.append(replace(event, incarnation=real.highest.get(event.group, event.incarnation)))
            if real.phase == "forming":
                continue
            simulated, _ = step(simulated, _all_here(arrived))
            arrived = []
        elif isinstance(event, m.Vote) and real.committed[0] > before.committed[0]:
            everybody = m.AllVoted(before.step_in_flight, before.epoch, event.result.weights_digest)
            simulated, decision = step(simulated, everybody)
            commits += 1
            admitted += len(real.live.keys() - before.live.keys())
            actions += _compare_actions(path, record, decision)
        elif isinstance(event, m.Vote) and event.result.ok and real.epoch == before.epoch and before.phase == "running":
            continue
        else:
            if arrived:
                simulated, _ = step(simulated, _all_here(arrived))
                arrived = []
            simulated, decision = step(simulated, event)
            lost += isinstance(event, m.Lost)
            actions += _compare_actions(path, record, decision)
        _compare(path, record, real, simulated)
    return Followed(commits, lost, admitted, actions)


def _all_here(hellos: Sequence[m.Hello]) -> m.AllHere:
    return m.AllHere(tuple((one.group, one.incarnation) for one in hellos), tuple(one.process_nonce for one in hellos))


def _compare_actions(path: Path, record: Record, decision: m.Decision) -> int:
    """The number of the decision's actions, which are those of the run."""
    if decision.actions != record.actions:
        raise JournalError(f"{path} line {record.n}: the simulator decides {decision.reason!r}")
    return len(decision.actions)


def _compare(path: Path, record: Record, real: State, simulated: State) -> None:
    for name in ("phase", "epoch", "committed", "live", "learners", "holders", "outcome"):
        if getattr(real, name) != getattr(simulated, name):
            raise JournalError(
                f"{path} line {record.n}: {name} is {getattr(simulated, name)} in the simulator and "
                f"{getattr(real, name)} in the run"
            )
    if real.phase == "running":
        for group in real.live:
            ours = (simulated.segments_of(group), simulated.standing_of(group))
            if ours != (real.segments_of(group), real.standing_of(group)):
                raise JournalError(f"{path} line {record.n}: group {group} has another plan in the simulator")
