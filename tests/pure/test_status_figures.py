"""What status.json says of a state beyond its plain fields."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import psutil
import pytest

from spare_megatron.controller.messages import Hello, Ready
from spare_megatron.coordinator import records
from spare_megatron.coordinator.status_figures import least_hosts, next_save, stage_of, status_figures
from spare_megatron.watch.status_texts import status_text
from tests.pure.told_job import SPEC, ToldJob


def test_the_fewest_hosts_of_a_shard_are_counted() -> None:
    """Shard i of four lies on groups i and i - 1."""
    job = ToldJob()
    assert least_hosts(job.state) == 2
    job.lose(1)
    assert least_hosts(job.state) == 1
    job.lose(3)
    assert least_hosts(job.state) == 1
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
        ToldJob().state,
        spec=replace(SPEC, save_every=every),
        committed=(committed, 1),
        save_interval=interval,
        save_step=saved,
        save_now=now,
    )
    assert next_save(state) == step


def test_the_stages_of_a_return() -> None:
    job = ToldJob()
    job.step()
    job.lose(3)
    job.step()
    job.tell(Hello(3, 1, "f", 0, birth="again"))
    assert status_figures(job.state)["learning"] == {"3": "its processes start"}
    job.tell(Ready(3, 1))
    assert status_figures(job.state)["learning"] == {"3": "waits for an offer"}
    job.step()
    assert status_figures(job.state)["learning"] == {"3": "takes the state of step 3"}
    assert stage_of(replace(job.state.learners[3], applied=4)) == "has applied step 4"


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


@pytest.mark.parametrize(("old_s", "believed"), [(3.0, True), (900.0, False), (-5.0, False), (None, False)])
def test_the_start_of_a_process_that_cannot_be_believed_is_not_used(
    monkeypatch: pytest.MonkeyPatch, old_s: float | None, believed: bool
) -> None:
    def create_time(_: object) -> float:
        if old_s is None:
            raise psutil.AccessDenied
        return time.time() - old_s

    monkeypatch.setattr(psutil.Process, "create_time", create_time)
    assert math.isfinite(records._process_began_s()) == believed
