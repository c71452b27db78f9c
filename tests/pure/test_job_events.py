"""Which of the coordinator's records are events for the operator's command, and what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from spare_megatron.coordinator.job_events import values_of
from spare_megatron.coordinator.journal import Record
from spare_megatron.protocol.machine import State
from spare_megatron.protocol.machine import step as machine_step
from tests.pure.scenario import FOLDER, Player

FIELDS = (
    *("event", "step", "group", "incarnation", "checkpoint", "outcome", "index"),
    *("time", "run_dir", "record", "life", "epoch", "reason", "live", "learners"),
)
BEGUN = ("open N=3 K=1 r=2 steps=9", "hello 0,1,2")
LEARNS = (*BEGUN, "lost 1", "hello 1 inc=1", "ready 1", "vote all weights=w0")


class Telling(Player):
    """A player that takes down the events of every record."""

    def __init__(self) -> None:
        super().__init__()
        self.reported: list[dict[str, object]] = []
        self.records = 0

    def tell(self, line: str) -> None:
        words = line.split()
        options = dict(word.split("=", 1) for word in words if "=" in word)
        for event in self._events(words[0], [word for word in words[1:] if "=" not in word], options):
            before: State = self.state
            self.state, decision = machine_step(before, event)
            self.records += 1
            record = Record(self.records, 0.25, decision.epoch, event, tuple(decision.actions), decision.reason)
            self.reported += values_of(record, before, self.state, Path("/runs/first"))


def reported(*commands: str) -> list[dict[str, object]]:
    teller = Telling()
    for command in commands:
        teller.tell(command)
    return teller.reported


def brief(*commands: str) -> list[str]:
    """'kind step group.incarnation' of every event."""
    return [
        f"{one['event']} {one['step']}" + ("" if one["group"] is None else f" {one['group']}.{one['incarnation']}")
        for one in reported(*commands)
    ]


def test_all_fields_are_there_in_one_order() -> None:
    [job_attempt, loss, patch] = reported(*BEGUN, "lost 2")
    assert [tuple(one) for one in (job_attempt, loss, patch)] == [FIELDS] * 3
    assert job_attempt == {
        "event": "life",
        "step": 1,
        "group": None,
        "incarnation": None,
        "checkpoint": None,
        "outcome": None,
        "index": 0,
        "time": "1970-01-01T00:00:00.250Z",
        "run_dir": "/runs/first",
        "record": 1,
        "life": 1,
        "epoch": 0,
        "reason": "job attempt 1 of the job: 3 groups, 1 piece per shard, redundancy 2, steps 1 to 9",
        "live": [],
        "learners": [],
    }
    assert (loss["live"], loss["epoch"], loss["record"], loss["reason"]) == ([0, 1], 2, 5, patch["reason"])
    assert str(loss["reason"]).startswith("group 2 exited; epoch 2 with 2 of 3 groups; step 1: 1 piece of 1 shard lost")


@pytest.mark.parametrize(
    ("commands", "expected"),
    [
        (("lost 1",), ["loss 1 1.0", "patch 1"]),
        (("lost 0,1",), ["loss 1 0.0", "loss 1 1.0", "wipe_out 0"]),
        (("lost 1", "lost 1"), ["loss 1 1.0", "patch 1"]),
        (("vote all", "reopen"), []),
        (("lost 1", "hello 1 inc=1"), ["loss 1 1.0", "patch 1", "restart 1 1.1"]),
        (("hello 1 inc=1",), ["loss 1 1.0", "patch 1", "restart 1 1.1"]),
        (("lost 1", "hello 1 inc=1", "ready 1"), ["loss 1 1.0", "patch 1", "restart 1 1.1", "ready 1 1.1"]),
        (("lost 1", "hello 1 inc=1", "lost 1 inc=1"), ["loss 1 1.0", "patch 1", "restart 1 1.1", "loss 1 1.1"]),
        (("vote 0,1,2 no",), []),
        (("lost 0,1", "attempt first=0"), ["loss 1 0.0", "loss 1 1.0", "wipe_out 0", "life 1"]),
    ],
)
def test_the_events_of_a_course(commands: tuple[str, ...], expected: list[str]) -> None:
    assert brief(*BEGUN, *commands)[1:] == expected


def test_the_events_of_a_start_without_a_group() -> None:
    assert brief("open N=3 K=1 r=2", "hello 0", "lost 1", "hello 2") == ["life 1", "loss 1 1.0"]


def test_a_return_and_a_save() -> None:
    caught_up = ("caught-up 1 step=1 weights=w1", "caught-up 1 step=2 weights=w2")
    events = reported(*LEARNS, "vote all weights=w1", *caught_up, "vote all weights=w2")
    assert [one["event"] for one in events[:6]] == ["life", "loss", "patch", "restart", "ready", "return"]
    back = events[5]
    assert (back["group"], back["incarnation"], back["live"], back["learners"]) == (1, 1, [0, 1, 2], [])
    saves = reported(*BEGUN, "vote all weights=w0", "saved 0 step=1", "vote all weights=w1")[1:]
    assert [(one["event"], one["step"], one["group"]) for one in saves] == [("save", 1, 0)]
    assert saves[0]["checkpoint"]


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.txt")), ids=lambda path: path.stem)
def test_every_scenario_has_sound_events(path: Path) -> None:
    """Each loss is of one who was there, reported once; an end is the last event of its job attempt."""
    commands = [line for line in path.read_text().splitlines() if line and line[0] not in " #"]
    there: set[tuple[object, object]] = set()
    events = reported(*commands)
    for n, one in enumerate(events):
        who = one["group"], one["incarnation"]
        assert (one["group"] is None) == (one["event"] in ("life", "patch", "wipe_out", "end"))
        if one["event"] in ("restart", "return", "ready"):
            there.add(who)
        elif one["event"] == "loss":
            there.discard(who)
            assert one["incarnation"] is not None or one["epoch"] in (0, 1)
        elif one["event"] in ("wipe_out", "end"):
            assert all(later["event"] == "life" for later in events[n + 1 : n + 2])
            assert one["outcome"]
    losses = [(one["life"], one["group"], one["incarnation"]) for one in events if one["event"] == "loss"]
    assert len(losses) == len(set(losses))
