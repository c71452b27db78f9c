"""Jobs of real processes whose journal has many parts and snapshots, and coordinators that die at each of its files."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spare_megatron.config.exits import ExitCode
from spare_megatron.coordinator.journal import resume
from spare_megatron.coordinator.journal_parts import beside
from spare_megatron.runtime import failpoints
from tests.process.control_job import ControlJob

STEPS, MANY_STEPS = 60, 240
PLACES = ("part.prepare", "part.begin", "part.show", "part.compress", "part.compressed", "snapshot-N.json.rename")


class SmallParts(ControlJob):
    """A control plane whose coordinator takes many snapshots."""

    coordinator_module = "tests.process.small_parts"

    def __init__(self, path: Path, steps: int) -> None:
        super().__init__(path, 3, 1, f"--steps {steps} --pieces 2 --piece-s 0.005")
        self.steps = steps

    def check(self) -> None:
        """To the end; then every step is there once, and the journal has several parts."""
        assert self.finish() == ExitCode.FINISHED, self.outputs()
        self.check_steps(self.steps)
        assert set(self.exits().values()) == {ExitCode.FINISHED}
        assert sum(name.suffix == ".gz" for _, name in beside(self.run_dir.journal)) >= 2
        found = resume(self.run_dir.journal, lambda *_: None, lambda _: None)
        assert (found.state.committed[0], found.notes) == (self.steps, ())
        assert found.followed_bytes < 20_000


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., SmallParts]]:
    made: list[SmallParts] = []

    def make(faults: str = "", steps: int = STEPS) -> SmallParts:
        made.append(SmallParts(tmp_path, steps))
        if faults:
            made[-1].environment[failpoints.VARIABLE] = faults
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_job_of_many_parts_is_killed_and_goes_on_from_a_snapshot(job: Callable[..., SmallParts]) -> None:
    one = job()
    one.start()
    for step in (15, 30, 45):
        one.until(lambda step=step: one.committed() >= step)
        one.kill_coordinator()
        one.start_coordinator()
    one.check()


def test_coordinators_die_at_each_place_of_a_part_and_of_a_snapshot(job: Callable[..., SmallParts]) -> None:
    """One after the other, each at another place; the last one goes on to the end."""
    one = job(steps=MANY_STEPS)
    for place in PLACES:
        one.environment[failpoints.VARIABLE] = f"coordinator:{place}=kill,after=1"
        one.start_coordinator()
        if not one.ranks:
            for group in range(one.groups):
                one.start_group(group)
        assert one.coordinator is not None
        assert one.coordinator.wait(60) == -signal.SIGKILL, one.outputs()
        assert one.committed() < MANY_STEPS, f"the job was over before {place}"
        print(f"step {one.committed()}: {place}")
    one.environment.clear()
    one.start_coordinator()
    one.check()


def test_a_disk_without_room_for_snapshots_and_parts_stops_nothing(job: Callable[..., SmallParts]) -> None:
    names = ("part.prepare", "snapshot-N.json.write")
    one = job(";".join(f"coordinator:{name}=ENOSPC" for name in names))
    one.start()
    assert one.finish() == ExitCode.FINISHED, one.outputs()
    one.check_steps(STEPS)
    assert not list(beside(one.run_dir.journal))
    reported = [
        line for line in one.output("coordinator").splitlines() if "ENOSPC" in line and line.startswith("spare:")
    ]
    assert len(reported) == 2, "the next part and the snapshots, each once"
