"""What the coordinator answers the launcher who asks whether a lost group may be started again."""

from __future__ import annotations

import json

import pytest

from spare_megatron.coordinator.call_answers import RestartAnswers
from spare_megatron.protocol.machine import step
from spare_megatron.protocol.messages import Loss, Lost
from tests.pure.scenario import Player

RUNNING = ("open N=3 K=2 r=2 steps=4", "hello 0,1,2")


def answer_after(*commands: str, waits: bool = False) -> tuple[bool, bool, str]:
    """(now, never, why) for incarnation 0 of group 1."""
    player = Player()
    for command in commands:
        player.play(command)
    reported = RestartAnswers(lambda: player.state, lambda: waits).answer(1, 0)
    assert reported.highest_incarnation == (player.state.highest.get(1, -1) if not reported.never and not waits else 0)
    return reported.now, reported.never, reported.why


@pytest.mark.parametrize(
    ("commands", "expected"),
    [
        ((*RUNNING, "lost 1"), (True, False, "")),
        ((*RUNNING, "lost 1", "vote 0,2"), (True, False, "")),
        # Not yet: its loss is not known, or the job forms and has no learners.
        (RUNNING, (False, False, "")),
        (("open N=3 K=2 r=2 steps=4", "hello 0,1", "lost 1"), (False, False, "")),
        # Another process has come already, which learns, or is lost again and asked about by itself.
        ((*RUNNING, "lost 1", "hello 1 inc=1"), (False, True, "its incarnation 1 is there")),
        ((*RUNNING, "lost 1", "hello 1 inc=1", "lost 1 inc=1"), (True, False, "")),
        # The job ends.
        ((*RUNNING, "lost 1", "stop-requested"), (False, True, "")),
        ((*RUNNING, "lost 1", "lost 2"), (False, True, "")),
    ],
)
def test_when_a_group_may_be_started_again(commands: tuple[str, ...], expected: tuple[bool, bool, str]) -> None:
    assert answer_after(*commands) == expected


def test_while_nothing_is_decided_it_is_asked_again() -> None:
    assert answer_after(*RUNNING, "lost 1", waits=True) == (False, False, "")


@pytest.mark.parametrize(
    ("cause", "lasting"),
    [
        ("corrupt", True),
        ("diverged", True),
        ("silent", False),
        ("stalled", False),
        ("closed", False),
        ("exited", False),
    ],
)
def test_a_group_whose_results_were_wrong_stays_lost(cause: str, lasting: bool) -> None:
    player = Player()
    for command in RUNNING:
        player.play(command)
    state, decision = step(player.state, Lost((Loss(1, 0, cause, 1, "it shows"),)))
    first = RestartAnswers(lambda: state, lambda: False)
    first.observe(decision.actions)
    later = RestartAnswers(lambda: state, lambda: False)
    later.recall(json.loads(json.dumps({"wrong": first.memo()})))
    for answers in (first, later):
        reported = answers.answer(1, 0)
        assert (reported.never, reported.now) == (lasting, not lasting)
        assert reported.why == (f"group 1 (rank 1) {cause}: it shows" if lasting else "")
        assert not answers.answer(1, 1).never, "another incarnation is another question"
