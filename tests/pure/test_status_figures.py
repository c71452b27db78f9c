"""What status.json says of a state beyond its plain fields."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spare_megatron.control_plane.reports import LastRank
from spare_megatron.coordinator import records
from spare_megatron.coordinator.status_figures import live_hosts, next_save, stage_of, status_figures, watched_figures
from spare_megatron.coordinator.watched_group import GroupStanding
from spare_megatron.monitor.status_texts import status_text
from spare_megatron.protocol.machine import initial_state
from spare_megatron.protocol.messages import Hello, Ready
from spare_megatron.runtime.run_directory import RunDirectory
from tests.pure.scripted_job import SPEC, ScriptedJob


def test_the_fewest_hosts_of_a_shard_are_counted() -> None:
    """Shard i of four lies on groups i and i - 1."""
    job = ScriptedJob()
    assert live_hosts(job.state) == (2, [])
    job.lose(1)
    assert live_hosts(job.state) == (1, [0, 2])
    job.lose(3)
    assert live_hosts(job.state) == (1, [0, 2])
    job.lose(0)
    assert status_figures(job.state)["hosts_least"] is None, "the job is wiped out"


@pytest.mark.parametrize(
    ("committed", "every", "interval", "saved", "now", "step"),
    [
        (0, 0, 0, 0, False, None),
        (0, 10, 0, 0, False, 10),
        (9, 10, 0, 0, False, 10),
        (10, 10, 0, 10, False, 20),
        (95, 10, 0, 90, False, 99),
        (4, 0, 7, 3, False, 10),
        (14, 0, 7, 3, False, 15),
        (4, 0, 0, 0, True, 5),
    ],
)
def test_the_next_save(committed: int, every: int, interval: int, saved: int, now: bool, step: int | None) -> None:
    state = replace(
        ScriptedJob().state,
        spec=replace(SPEC, save_every=every),
        committed=(committed, 1),
        save_interval=interval,
        save_step=saved,
        save_now=now,
    )
    assert next_save(state) == step


def returning() -> ScriptedJob:
    """A job whose group 3 was lost and is started again: its processes have said so."""
    job = ScriptedJob()
    job.step()
    job.lose(3)
    job.step()
    job.tell(Hello(3, 1, "f", 0, process_nonce="again"))
    return job


def test_the_stages_of_a_return() -> None:
    job = returning()
    assert status_figures(job.state)["learning"] == {"3": "its processes start"}
    assert stage_of(replace(job.state.learners[3], ready=True)) == "waits for an offer"
    job.tell(Ready(3, 1))
    figures = status_figures(job.state)
    assert figures["learning"] == {"3": "takes the state of step 2"}
    assert figures["offers"] == {"3": {"number": 1, "step": 2, "donors": [0, 1]}}
    assert figures["ready"] == [3]
    assert stage_of(replace(job.state.learners[3], applied=4)) == "has applied step 4"


def test_with_state_shards_who_is_ready_joins_with_a_commit() -> None:
    job = returning()
    assert job.state.spec is not None
    starts = replace(job.state, spec=replace(job.state.spec, state_shards=4, state_copies=2))
    ready = replace(starts, learners={3: replace(starts.learners[3], ready=True)})
    found = [[status_figures(state)[name] for name in ("learning", "ready")] for state in (starts, ready)]
    assert found == [[{"3": "its processes start"}, []], [{"3": "joins with the next commit"}, [3]]]


def test_the_status_of_an_older_version_is_shown() -> None:
    """One that says nothing of hosts, of the next save, and of how far groups are that come back."""
    status = {
        "phase": "running",
        "step": 3,
        "last_step": 9,
        "epoch": 2,
        "num_groups": 2,
        "live": {"0": 0},
        "load": {"0": 4},
        "learners": {"1": 1},
        "failures_masked": 1,
        "last_losses": [],
        "saved_step": 2,
        "loss": 2.0,
        "outcome": "",
        "reason": "",
        "time_unix_s": 5.0,
    }
    text = status_text(status)
    assert "being brought up to date: group 1" in text
    assert text.endswith("last good checkpoint: step 2")


def test_the_losses_that_are_left_are_those_until_a_shard_has_one_host() -> None:
    job = ScriptedJob(replace(SPEC, num_groups=4, offsets=(0, 1, 3)))
    assert [status_figures(job.state)[name] for name in ("hosts_least", "losses_left", "last_hosts")] == [3, 2, []]
    job.lose(1)
    job.lose(2)
    assert [status_figures(job.state)[name] for name in ("hosts_least", "losses_left", "last_hosts")] == [1, 0, [0, 3]]


STATUS = {
    "phase": "running",
    "step": 16,
    "last_step": 99,
    "epoch": 2,
    "num_groups": 4,
    "live": {"0": 0, "1": 0, "2": 0},
    "load": {"0": 4, "1": 4, "2": 5},
    "learners": {"3": 1},
    "learning": {"3": "takes the state of step 14"},
    "offers": {"3": {"number": 1, "step": 14, "donors": [0, 1]}},
    "hosts_least": 1,
    "losses_left": 0,
    "last_hosts": [0, 2],
    "next_save": 20,
    "failures_masked": 1,
    "last_losses": [],
    "saved_step": 10,
    "loss": 2.0,
    "outcome": "",
    "reason": "",
    "groups": {
        "0": {"step": 17, "phase": "forward", "rank": 0, "pieces": 2, "still_s": 0.3, "silent_s": 0.1},
        "1": {"step": 17, "phase": "forward", "rank": 1, "pieces": 1, "still_s": 4.26, "silent_s": 3.14},
        "2": {"step": 17, "phase": "reduce", "rank": 0, "pieces": 5, "still_s": 9.0, "silent_s": 0.1},
        "3": {"step": 0, "phase": "start", "rank": 0, "pieces": 0, "still_s": 30.0, "silent_s": 0.2},
    },
    "time_to_train": {
        "steps": 93,
        "without_failures_s": 93.0,
        "predicted_s": 97.65,
        "steps_done": 10,
        "taken_s": 12.0,
        "at_this_pace_s": 111.6,
    },
    "time_unix_s": 1030.0,
}


def test_the_status_says_who_is_behind_what_threatens_and_how_long_it_takes() -> None:
    lines = status_text(STATUS).splitlines()
    assert lines[2:] == [
        "  groups 0-1: 4 pieces each in the step in flight",
        "  group 2: 5 pieces in the step in flight",
        "being brought up to date: group 3 (takes the state of step 14, from groups 0-1)",
        "furthest behind: group 1 (rank 1) in step 17, forward, 1 piece done, for 4.3 s",
        "not received for up to 3.1 s: group 1",
        "some shard has one live host: the loss of one of groups 0, 2 would be a wipe-out",
        "last good checkpoint: step 10, next save: step 20",
        "the 93 steps left at the choice take 1:33 min without failures, 1:38 min predicted, 1:52 min at the pace of "
        "the 10 done",
    ]


def test_steps_are_written_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what changes all the time, while the job trains; a loss is written at once."""
    run_dir, job, clock = RunDirectory(tmp_path), ScriptedJob(), [1000.0]
    monkeypatch.setattr(records.time, "thread_time", lambda: 0.0)
    written, asked = records.Records(run_dir, lambda: clock[-1]), list[float]()

    def watched() -> dict[str, Any]:
        asked.append(clock[-1])
        standing = GroupStanding(LastRank(1, 1, "reduce", 5, 3, 0.0), 2.0, 0.25)
        return watched_figures({0: standing}, {0: 0.5}, {0: (2, 0.1)}, None)

    for now_s in (1000.0, 1000.5, 1001.0, 1001.5, 1002.0, 1002.5):
        clock.append(now_s)
        written.write_status(job.state, watched)
    assert asked == [1000.0, 1002.0]
    status = json.loads(run_dir.status.read_text())
    assert status["time_unix_s"] == 1002.0
    assert status["groups"] == {
        "0": {"step": 1, "phase": "reduce", "rank": 1, "pieces": 3, "still_s": 2.0, "silent_s": 0.25}
        | {"speed": 0.5, "left": 2}
    }
    job.step()
    for now_s in (1003.0, 1003.5, 1004.0):
        clock.append(now_s)
        written.write_status(job.state, watched)
    assert asked[2:] == [1004.0]
    assert json.loads(run_dir.status.read_text())["step"] == job.state.committed[0]
    job.lose(0)
    clock.append(1004.5)
    written.write_status(job.state, watched)
    assert asked[3:] == [1004.5]
    job.lose(1)
    for now_s in (1005.0, 1010.0):
        clock.append(now_s)
        written.write_status(job.state, watched)
    assert asked[4:] == [1005.0], "the job attempt is over"


def test_a_coordinator_that_waits_for_groups_writes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its status would look like that of one that is gone."""
    monkeypatch.setattr(records.time, "thread_time", lambda: 0.0)
    clock = [1000.0]
    written = records.Records(RunDirectory(tmp_path), lambda: clock[-1])
    for now_s in (1000.0, 1001.0, 1002.5):
        clock.append(now_s)
        written.write_status(initial_state())
    assert json.loads((tmp_path / "status.json").read_text())["time_unix_s"] == 1002.5


@pytest.mark.parametrize(("old_s", "believed"), [(3.0, True), (900.0, False), (0.0, False)])
def test_the_start_of_a_process_that_cannot_be_believed_is_not_used(
    monkeypatch: pytest.MonkeyPatch, old_s: float, believed: bool
) -> None:
    monkeypatch.setattr(records, "process_age_s", lambda: old_s)
    assert math.isfinite(records._process_began_s(1000.0)) == believed
