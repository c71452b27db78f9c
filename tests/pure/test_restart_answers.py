"""What the coordinator answers the launcher who asks whether a lost group may be started again."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spare_megatron.config.exits import ExitCode
from spare_megatron.control_plane import control_pb2 as pb
from spare_megatron.coordinator.call_answers import DrainRequests, RestartAnswers
from spare_megatron.protocol.machine import step
from spare_megatron.protocol.messages import Loss, Lost
from spare_megatron.runtime.run_directory import RunDirectory
from spare_megatron.worker import fenced_end
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
    ("words", "drained"),
    [
        (("drain 2",), (False, True)),
        # The launcher, which takes that back itself, is to ask again soon.
        (("drain 2 for-now",), (False, False)),
        (("drain 2 for-now", "drain 2 undo for-now"), (True, False)),
        # An operator's wish is for longer, whichever was first.
        (("drain 2 for-now", "drain 2", "drain 2 undo for-now"), (False, True)),
        (("drain 2", "drain 2 for-now", "drain 2 undo for-now"), (False, True)),
        (("drain 2 for-now", "drain 2 undo"), (True, False)),
    ],
)
def test_who_keeps_a_group_out(words: tuple[str, ...], drained: tuple[bool, bool]) -> None:
    player = Player()
    for command in ("open N=4 K=2 r=2 steps=6", "hello 0,1,2,3", words[0], "vote 0,1,2,3", *words[1:]):
        player.play(command)
    assert 2 not in player.state.live
    answer = RestartAnswers(lambda: player.state, lambda: False).answer(2, 0)
    assert (answer.now, answer.drained) == drained


@pytest.mark.parametrize("asked", [0, 1])
def test_a_drain_that_cannot_be_decided_is_no_refusal_for_good(asked: int) -> None:
    """Before the request, or while it is written down."""
    player, waits = Player(), iter([False] * asked + [True])
    for command in RUNNING:
        player.play(command)
    applied: list[object] = []
    addresses: Any = SimpleNamespace(groups_at=lambda hosts, meant: ())
    drains = DrainRequests(lambda: player.state, lambda: next(waits), applied.append, addresses)
    answer = asyncio.run(drains.answer(pb.DrainRequest(groups=[1], for_now=True), None))
    assert (answer.undecided, bool(answer.refusal), len(applied)) == (True, True, asked)


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
def test_a_group_whose_results_were_wrong_starts_on_other_devices_only(cause: str, lasting: bool) -> None:
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
        assert (reported.elsewhere, reported.now, reported.never) == (lasting, not lasting, False)
        assert reported.highest_incarnation == 0
        assert reported.why == (f"group 1 (rank 1) {cause}: it shows" if lasting else "")
        assert not answers.answer(1, 1).elsewhere, "another incarnation is another question"


def test_torchrun_does_not_start_a_group_whose_results_were_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would do so at once, on the same devices."""
    answers = [pb.RestartAnswer(), pb.RestartAnswer(elsewhere=True, why="it shows", highest_incarnation=4)]

    async def ask(*_: object) -> pb.RestartAnswer:
        return answers.pop(0)

    monkeypatch.setattr(fenced_end, "_ask", ask)
    monkeypatch.setattr(fenced_end, "security_of", lambda *_: None)
    monkeypatch.setattr(RunDirectory, "coordinator", lambda _: SimpleNamespace(address="127.0.0.1:1"))
    run_dir = RunDirectory(tmp_path)
    run_dir.create()
    place: Any = SimpleNamespace(launcher="torchrun", run_dir=str(tmp_path), tls_dir="none", group=1, incarnation=4)
    assert fenced_end.status_of(ExitCode.FENCED, place) == ExitCode.FINISHED
    assert not answers
    place.launcher = "spare-launch"
    assert fenced_end.status_of(ExitCode.FENCED, place) == ExitCode.FENCED
