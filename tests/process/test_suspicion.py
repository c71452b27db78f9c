"""Ranks that are not dead but do not go on: stopped processes and hangs. They are fenced, and stay harmless."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from spare_megatron.config.exits import ExitCode
from spare_megatron.protocol.messages import Lost
from tests.process.harness import launch, toy_digests

HEARTBEAT_S, PROGRESS_S = 3.0, 6.0
ALONE_S = 4.0
"""The progress time-out of the test beside which little else runs."""
HANGS = ((1, 5, "forward"), (2, 8, "reduce"))
"""(group, step, point)."""
WORDS = (
    *("--steps", "14", "--pieces", "2", "--piece-s", "0.005", "--redundancy", "3"),
    *("--heartbeat-s", str(HEARTBEAT_S), "--progress-s", str(PROGRESS_S)),
)


def same_weights(run_dir: Path, groups: set[int]) -> None:
    """The survivors' weights agree (toy sums are exact, so a wrong or missing piece would show)."""
    digests = toy_digests(run_dir)
    for position in (0, 1):
        assert len({digests[f"group-{g}-rank-{position}"] for g in groups}) == 1


@pytest.mark.parametrize("position", [0, 1], ids=["leader", "rank1"])
def test_a_stopped_rank_is_fenced_and_leaves_when_it_goes_on(tmp_path: Path, position: int) -> None:
    """The job trains until it has."""
    job = launch(tmp_path, *WORDS, "--steps", "100000")
    job.wait_for_step(4)
    pid = job.pid(1, position)
    others = [p for p in job.pids(1) if p != pid]
    job.kill(pid, number=signal.SIGSTOP)
    job.wait_for("the stop is masked", lambda: any(line["recovery"] for line in job.metrics), 30)
    [lost] = [record.event for record in job.records() if isinstance(record.event, Lost)]
    assert [(loss.group, loss.position, loss.cause) for loss in lost.losses] == [(1, position, "silent")]
    job.kill(pid, number=signal.SIGCONT)
    job.wait_for_exit(pid, *others)
    job.kill(job.process.pid, number=signal.SIGTERM)
    lines = job.finish(code=ExitCode.REQUEUE)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert [line["recovery"]["lost_groups"] for line in lines if line["recovery"]] == [[1]]
    said = (tmp_path / "logs" / "group-1" / f"rank-{position}.log").read_text()
    assert not said or "fenced" in said, "spare-launch kills what is not stopped any more, if that is sooner"
    same_weights(tmp_path, {0, 2})


@pytest.mark.alone  # the time until a hang is masked is compared with the time-out
def test_hangs_are_found_by_the_counter_that_stands_still(tmp_path: Path) -> None:
    """In the forward pass, then in the sum of another group, and behind the last commit, when the job only ends."""
    hangs = [f"hang:group={group},position=1,step={step},at={at}" for group, step, at in (*HANGS, (3, 14, "apply"))]
    lines = launch(tmp_path, *WORDS, "--progress-s", str(ALONE_S), groups=4, inject=hangs).finish()
    assert [line["step"] for line in lines] == list(range(1, 15))
    masked = [line for line in lines if line["recovery"]]
    assert [line["recovery"]["lost_groups"] for line in masked] == [[group] for group, _, _ in HANGS]
    assert [line["step"] for line in masked] == [step for _, step, _ in HANGS]
    for line in masked:
        print(f"step with the hang: {line['step_time_s']:.2f} s, progress time-out {ALONE_S} s")
        assert line["step_time_s"] < ALONE_S + 1.0
    events = [json.loads(line).get("event", {}) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    [last] = [event["losses"] for event in events if event.get("type") == "Lost"][-1]
    assert (last["group"], last["position"], last["cause"]) == (3, 1, "stalled")
    same_weights(tmp_path, {0})


@pytest.mark.full
@pytest.mark.parametrize(
    ("group", "at"), [(1, "forward"), (1, "backward"), (1, "reduce"), (1, "vote"), (1, "apply"), (0, "checkpoint")]
)
def test_a_hang_at_each_point_of_a_step_is_found(tmp_path: Path, group: int, at: str) -> None:
    """Within the progress time-out; the others train on, and end as they would have."""
    save = ("--save", str(tmp_path / "save"), "--save-interval", "7")
    lines = launch(tmp_path, *WORDS, *save, inject=[f"hang:group={group},position=1,step=7,at={at}"]).finish()
    assert [line["step"] for line in lines] == list(range(1, 15))
    [masked] = [line for line in lines if line["recovery"]]
    assert masked["recovery"]["lost_groups"] == [group]
    assert masked["step_time_s"] < PROGRESS_S + 1.5
    same_weights(tmp_path, {0, 1, 2} - {group})
