"""Standbys take the places of lost groups: real processes, the toy model.

The weights of every step, as all groups vote them, must be those of the run in which nothing fails.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from spare_megatron.control.run_directory import RunDirectory
from tests.process.harness import Job, launch
from tests.process.returning import check_same, check_simulated, is_member, leave_whole, voted

pytestmark = pytest.mark.timeout(300)
GROUPS, SIZE, PIECES = 3, 2, 2
CALM_STEPS = 600


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> dict[int, set[str]]:
    """Step -> digest of the weights after it, of a run without failures: of one group that computes all pieces, whose
    sums are the same."""
    words = ("--steps", str(CALM_STEPS), "--pieces", str(GROUPS * PIECES))
    job = launch(tmp_path_factory.mktemp("calm"), *words, groups=1)
    job.finish(timeout_s=200.0)
    return voted(job)


def start(run_dir: Path, *words: str, inject: tuple[str, ...] = (), restarts: int = 3) -> Job:
    toy = ("--steps", str(CALM_STEPS), "--pieces", str(PIECES), "--redundancy", "3", "--piece-s", "0.1")
    return launch(run_dir, *toy, "--spare-max-group-restarts", str(restarts), *words, groups=GROUPS, inject=inject)


def waiting(job: Job) -> dict[str, list[int]]:
    """Name -> the processes that wait for a place, of all that have come that far."""
    path = job.run_dir / "processes.json"
    found: dict[str, list[int]] = {}
    for one in json.loads(path.read_text())["waiting"] if path.exists() else ():
        if RunDirectory(job.run_dir).waits(one["name"], one["pid"]):
            found.setdefault(one["name"], []).append(one["pid"])
    return found


def wait_for(job: Job, *names: str) -> None:
    """Until all ranks of these standbys, or these warm ranks, wait."""
    sizes = {name: SIZE if name.startswith("standby") else 1 for name in names}
    job.wait_for(f"{names}", lambda: all(len(waiting(job).get(n, ())) == s for n, s in sizes.items()), timeout_s=120.0)


def said(job: Job, about: str) -> list[str]:
    """The lines of the launcher that have the words ``about``, without times."""
    lines = (job.run_dir / "launch.out").read_text().splitlines()
    found = [
        line.removeprefix("spare-launch: ") for line in lines if line.startswith("spare-launch: ") and about in line
    ]
    return [re.sub(r"since [\d:]+", "since T", line) for line in found]


def test_a_standby_takes_the_place_and_the_next_one_takes_the_next(tmp_path: Path, calm: dict[int, set[str]]) -> None:
    job = start(tmp_path, "--spare-standby-groups", "1")
    wait_for(job, "standby-0")
    job.kill(*job.pids(2))
    job.wait_for("group 2", lambda: is_member(job, 2, 1))
    wait_for(job, "standby-1")
    job.kill(job.pid(0, 1))
    check_same(leave_whole(job, GROUPS, (2, 1), (0, 1)), calm)
    check_simulated(job, admissions=2)
    count = "restart 1 of at most 3 within an hour"
    assert said(job, "the place") == [
        f"the place of group 2 is taken by standby 0, as incarnation 1 (waiting since T): {count}",
        f"the place of group 0 is taken by standby 1, as incarnation 1 (waiting since T): {count}",
    ]
