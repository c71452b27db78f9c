"""A job that leaves after its time: one decision, in the journal, kept by a coordinator that was killed before it."""

from __future__ import annotations

import json
from pathlib import Path

from tests.process.harness import launch

DURATION_S = 8.0
WORDS = ("--steps", "100000", "--pieces", "2", "--piece-s", "0.1", "--duration-s", str(DURATION_S))


def test_a_job_leaves_after_its_time_whatever_dies_before(tmp_path: Path) -> None:
    inject = ("coordinator-sigkill:group=0,step=2,at=backward", "sigkill:group=1,step=3,at=reduce")
    job = launch(tmp_path, *WORDS, groups=2, group_size=1, inject=inject)
    lines = job.finish(0)
    records = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()[1:]]
    opened = [record for record in records if record["event"]["type"] == "Opened"]
    asked = [record for record in records if record["event"]["type"] == "StopRequested"]
    assert [record["event"]["fencing"] for record in opened] == [1, 2], "the coordinator came back once"
    assert [record["event"]["reason"] for record in asked] == [f"the job has run for {DURATION_S / 60:g} minutes"]
    assert asked[0]["time_unix_s"] - opened[0]["time_unix_s"] >= DURATION_S - 0.01
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["outcome"], summary["failures_masked"]) == ("left", 1)
    assert summary["steps"] == lines[-1]["step"] < 100000
