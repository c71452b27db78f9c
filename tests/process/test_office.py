"""Several coordinators on one run directory: one decides, the next takes over, no rank restarts, no step is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from spare_megatron.config.exits import ExitCode
from spare_megatron.recovery.journal import verify
from spare_megatron.recovery.office import Term, Terms
from tests.process.control_job import ROOT, ControlJob

LEASE_S = 1.0
STEPS = 400


class Candidates(ControlJob):
    """A control plane with two candidates."""

    def start_candidates(self) -> None:
        """Both, and the ranks as soon as one of them listens."""
        command = ["spare_megatron.cli.coordinator", "--run-dir", str(self.run_dir.path), "--no-store", "--life", "1"]
        self.candidates = [
            self.popen(f"candidate{index}", [*command, "--candidate", str(index), "--lease-s", str(LEASE_S)])
            for index in range(2)
        ]
        self.until(lambda: self.run_dir.coordinator() is not None)
        for group in range(self.groups):
            self.start_group(group)

    def holder(self) -> int:
        """Index of the candidate that the run directory names."""
        published = self.run_dir.coordinator()
        assert published is not None
        return [candidate.pid for candidate in self.candidates].index(published.pid)

    def steps(self) -> list[int]:
        """Steps of metrics.jsonl so far."""
        path = self.run_dir.metrics
        text = path.read_text() if path.exists() else ""
        return [json.loads(line)["step"] for line in text[: text.rfind("\n") + 1].splitlines()]

    def until_more_steps(self, count: int = 5) -> None:
        """Until the job has gone on by a few steps."""
        before = len(self.steps())
        self.until(lambda: len(self.steps()) >= before + count)

    def end_in_order(self) -> None:
        """All ranks leave with 0, every step was committed once, the journal replays."""
        for rank in self.ranks.values():
            assert rank.wait(60) == ExitCode.FINISHED
        assert self.steps() == list(range(1, STEPS + 1))
        verify(self.run_dir.journal)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Candidates]:
    one = Candidates(tmp_path, groups=2, size=2, flags=f"--steps {STEPS} --piece-s 0.01")
    try:
        yield one
    finally:
        one.close()


def test_the_holder_is_killed_and_the_next_takes_over(job: Candidates) -> None:
    job.start_candidates()
    job.until_more_steps()
    first = job.holder()
    job.candidates[first].kill()
    job.until(lambda: job.holder() != first)
    job.until_more_steps()
    newest = Terms(job.run_dir).newest()
    assert newest is not None
    assert newest.number == 2
    job.end_in_order()
    assert job.candidates[1 - first].wait(30) == ExitCode.FINISHED


def test_a_stopped_holder_is_replaced_and_decides_nothing_when_it_goes_on(job: Candidates) -> None:
    """As after a partition: it believes to be in office, and finds a later term before it makes anything final."""
    job.start_candidates()
    job.until_more_steps()
    first = job.holder()
    os.kill(job.candidates[first].pid, signal.SIGSTOP)
    job.until(lambda: job.holder() != first)
    job.until_more_steps()
    os.kill(job.candidates[first].pid, signal.SIGCONT)
    job.until(lambda: "this one is a candidate again" in job.output(f"candidate{first}"))
    job.until_more_steps()
    assert job.holder() == 1 - first
    job.end_in_order()
    assert [candidate.wait(30) for candidate in job.candidates] == [ExitCode.FINISHED] * 2


def test_a_claim_is_exclusive_and_the_number_grows(job: Candidates) -> None:
    terms = Terms(job.run_dir)
    assert terms.claim(life=1) == Term(1, 1)
    assert terms.claim(life=1) == Term(2, 1)
    terms.write(Term(2, 1, beat=7, over=0))
    assert terms.newest() == Term(2, 1, beat=7, over=0)


def test_a_candidate_without_a_life_is_one_sentence(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "spare_megatron.cli.coordinator", "--run-dir", str(tmp_path), "--candidate", "0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == ExitCode.BAD_INPUT
    assert "--candidate with --life 0 and --lease-s 5: both must be above 0" in done.stderr
    assert len(done.stderr.splitlines()) == 1
