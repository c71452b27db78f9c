"""The run directory of a job of 1000 groups: journal, metrics and status are those of the machine, written by hand."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from tests.pure.scripted_job import SPEC, ScriptedJob
from tests.pure.written_job import Written

GROUPS, STEP_S = 1000, 1.0


def thousand_groups(path: Path) -> Written:
    """After three steps."""
    spec = replace(SPEC, num_groups=GROUPS, offsets=(0, 1, 3), pieces_per_shard=2, last_step=1000)
    made = Written(path, ScriptedJob(spec, started_s=time.time() - 60))
    for _ in range(3):
        made.job.step()
    made.go_on()
    made.status()
    return made


def one_more_step(written: Written, *lost: int) -> None:
    """Takes STEP_S. These groups are lost in its middle, long enough for the page to see it before the commit."""
    began_s, job = time.monotonic(), written.job
    if lost:
        job.lose(*lost)
        written.go_on()
        written.status()
        time.sleep(0.6 * STEP_S)
    job.step()
    written.go_on()
    written.status()
    time.sleep(max(0.0, began_s + STEP_S - time.monotonic()))
