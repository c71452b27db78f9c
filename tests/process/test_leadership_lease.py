"""Several coordinators on one run directory: one decides, the next takes over, no rank restarts, no step is lost.

Whatever is stopped or killed, and wherever: every step is committed once and is in metrics.jsonl once, no group is
lost, and the run directory names the latest coordinator in the end.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from spare_megatron.config.exits import ExitCode
from spare_megatron.control_plane import control_pb2 as pb
from spare_megatron.control_plane.channel import Security
from spare_megatron.coordinator.journal import verify
from spare_megatron.coordinator.terms import Terms
from spare_megatron.launch.coordinator_client import CoordinatorClient
from spare_megatron.protocol.messages import Lost
from spare_megatron.runtime import failpoints
from tests.process.control_job import ROOT, ControlJob

LEASE_S = 0.6
PLACES = (
    "N.json.rename",
    "term.claim",
    "term.claimed",
    "term.copy",
    "term.open",
    "coordinator.json.rename",
    "term.show",
    "order.commit",
)
"""Where a candidate that takes over is stopped: from its claim to the first commit that is on the disk and not sent."""


class Candidates(ControlJob):
    """A control plane with several candidates, and ranks that train until they are asked to leave."""

    def start_candidates(self, count: int) -> None:
        """All of them, and the ranks once one listens. The first one that comes to an armed place stops itself."""
        self.run_dir.token(create=True)
        faults = [f"{place}=stop,once={self.arm(place)}" for place in PLACES]
        command = ["spare_megatron.cli.coordinator", "--run-dir", str(self.run_dir.path), "--life", "1"]
        self.candidates = [
            self.popen(
                f"candidate{index}",
                [*command, "--candidate", str(index), "--lease-s", str(LEASE_S)],
                {failpoints.VARIABLE: ";".join(faults)},
            )
            for index in range(count)
        ]
        self.until(lambda: self.run_dir.coordinator() is not None)
        for group in range(self.groups):
            self.start_group(group)

    def arm(self, place: str) -> Path:
        """The file whose presence arms a place."""
        return self.run_dir.path / f"armed-{place}"

    def holder(self) -> int:
        """Index of the candidate that the run directory names."""
        published = self.run_dir.coordinator()
        assert published is not None
        return [candidate.pid for candidate in self.candidates].index(published.pid)

    def signal(self, index: int, number: signal.Signals) -> None:
        """To one candidate."""
        os.kill(self.candidates[index].pid, number)

    def is_stopped(self, index: int) -> bool:
        """By the test, or by itself."""
        return psutil.Process(self.candidates[index].pid).status() == psutil.STATUS_STOPPED

    def steps(self) -> list[int]:
        """Steps of metrics.jsonl so far."""
        path = self.run_dir.metrics
        text = path.read_text() if path.exists() else ""
        return [json.loads(line)["step"] for line in text[: text.rfind("\n") + 1].splitlines()]

    def until_more_steps(self, count: int = 3) -> None:
        """Until the job has gone on by a few steps."""
        before = len(self.steps())
        self.until(lambda: len(self.steps()) >= before + count)

    def end_in_order(self, *gone: int) -> None:
        """Ask the job to leave; then what must hold at the end. ``gone``: candidates that were killed."""
        security = Security(self.run_dir.token())
        request = pb.StopRequest(reason="the test is over")
        client = CoordinatorClient(self.run_dir, security, lambda: False)
        asyncio.run(asyncio.wait_for(client.tell("RequestStop", request), 60))
        for name, process in [*self.ranks.items(), *enumerate(self.candidates)]:
            if name not in gone:
                try:
                    assert process.wait(60) == ExitCode.FINISHED, f"{name}\n{self.outputs()}"
                except subprocess.TimeoutExpired:
                    raise AssertionError(f"{name} does not end\n{self.outputs()}") from None
        verify(self.run_dir.journal)
        assert not [record for record in self.records() if isinstance(record.event, Lost)], "no group was lost"
        steps = self.steps()
        assert steps == list(range(1, len(steps) + 1)), self.outputs()
        self.check_names()

    def check_names(self) -> None:
        """The run directory shows the latest coordinator that served."""
        folder = self.run_dir.path / "terms"
        terms = [json.loads(path.read_text()) for path in folder.glob("*.json")]
        latest = max((term for term in terms if term["address"]), key=lambda term: term["number"])
        assert json.loads((self.run_dir.path / "coordinator.json").read_text()) == latest["address"]
        for path in (self.run_dir.journal, self.run_dir.metrics):
            assert path.samefile(folder / str(latest["number"]) / path.name)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Candidates]:
    flags = "--steps 1000000 --piece-s 0.005 --heartbeat-timeout-s 10 --progress-timeout-s 60"
    one = Candidates(tmp_path, groups=2, size=2, flags=flags)
    try:
        yield one
    finally:
        one.close()


def test_the_holder_is_killed_and_the_next_takes_over(job: Candidates) -> None:
    job.start_candidates(2)
    job.until_more_steps()
    first = job.holder()
    job.candidates[first].kill()
    job.until(lambda: job.holder() != first)
    job.until_more_steps()
    newest = Terms(job.run_dir).newest()
    assert newest is not None
    assert newest.number == 2
    job.end_in_order(first)


def test_a_stopped_holder_is_replaced_and_decides_nothing_when_it_goes_on(job: Candidates) -> None:
    """As after a partition: it believes to be in charge, and finds a later term before it makes anything final."""
    job.start_candidates(2)
    job.until_more_steps()
    first = job.holder()
    job.signal(first, signal.SIGSTOP)
    job.until(lambda: job.holder() != first)
    job.until_more_steps()
    job.signal(first, signal.SIGCONT)
    job.until(lambda: "waits for the lease again" in job.output(f"candidate{first}"))
    job.until_more_steps()
    job.end_in_order()


def test_a_candidate_that_is_stopped_while_it_takes_over_is_passed_over(job: Candidates) -> None:
    """The third one goes on with the job; the two that were stopped go on after it serves, in the middle of what they
    were doing: a claim, a copy of the journal, a rename of coordinator.json, a commit that is on the disk."""
    job.start_candidates(3)
    for place in PLACES:
        job.until_more_steps()
        first = job.holder()
        others = [index for index in range(3) if index != first]
        job.arm(place).touch()
        job.signal(first, signal.SIGSTOP)
        job.until(lambda others=others: any(job.is_stopped(index) for index in others))  # type: ignore[misc]
        third = next(index for index in others if not job.is_stopped(index))
        job.until(lambda third=third: job.holder() == third)  # type: ignore[misc]
        job.until_more_steps()
        for index in range(3):
            job.signal(index, signal.SIGCONT)
    job.until_more_steps()
    job.end_in_order()


@pytest.mark.parametrize("moments", [10, pytest.param(50, marks=pytest.mark.full)])
def test_candidates_are_stopped_at_random_moments(job: Candidates, moments: int) -> None:
    """The holder most often; for so short that nobody notices, and for longer than a takeover takes."""
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    job.start_candidates(3)
    job.until_more_steps()
    for _ in range(moments):
        time.sleep(dice.uniform(0.0, LEASE_S))
        index = job.holder() if dice.random() < 0.8 else dice.randrange(3)
        job.signal(index, signal.SIGSTOP)
        time.sleep(dice.choice((0.5, 1.5, 3.0)) * dice.uniform(0.0, LEASE_S))
        if dice.random() < 0.3:  # a second one, too
            other = dice.randrange(3)
            job.signal(other, signal.SIGSTOP)
            time.sleep(dice.uniform(0.0, LEASE_S))
            job.signal(other, signal.SIGCONT)
        job.signal(index, signal.SIGCONT)
    job.until_more_steps()
    job.end_in_order()


def test_a_candidate_without_a_job_attempt_is_one_sentence(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "spare_megatron.cli.coordinator", "--run-dir", str(tmp_path), "--candidate", "0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == ExitCode.BAD_INPUT
    assert "--candidate with --life 0 and --lease-s 5: both must be above 0" in done.stderr
    assert len(done.stderr.splitlines()) == 1
