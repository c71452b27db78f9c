"""A run directory as a coordinator writes it, of a scripted job."""

from __future__ import annotations

import json
from pathlib import Path

from spare_megatron.coordinator.journal import Journal, Replayed
from spare_megatron.coordinator.records import Records
from spare_megatron.protocol.messages import Decision
from spare_megatron.runtime.run_directory import RunDirectory
from tests.pure.scripted_job import ScriptedJob


class Written:
    """The run directory of a scripted job."""

    def __init__(self, path: Path, job: ScriptedJob) -> None:
        self.dir, self.job = RunDirectory(path), job
        self.records = self.steps = 0
        self.now_s = 0.0
        self.journal = Journal(self.dir.journal, Replayed(), lambda: self.now_s)

    def go_on(self) -> None:
        """Write what is new in the job."""
        for record, _, _ in self.job.transitions[self.records :]:
            self.now_s = record.time_unix_s
            self.journal.append(record.event, Decision(record.actions, record.reason, record.epoch))
            self.records += 1
        with self.dir.metrics.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in self.job.lines[self.steps :])
        self.steps = len(self.job.lines)

    def status(self) -> None:
        """Write status.json too, as it is now."""
        records = Records(self.dir)
        records.write_status(self.job.state, force=True)
        records.side.settle(10.0)
