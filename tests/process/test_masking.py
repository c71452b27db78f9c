"""Deaths at every point of a step, on real processes: nothing lost, nothing twice, the same weights bit for bit.

The toy model's gradients are multiples of 2^-12, so its sums are exact in any order and the weights of every run with
failures must equal those of the run without (tests/process/toy_engine.py).
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from spare_megatron.runtime.failpoints import VARIABLE
from tests.process.harness import Job, launch, toy_digests
from tests.process.returning import failure_free_pipeline

GROUPS, STEPS, PIECES = 5, 16, 2
WORDS = ("--steps", str(STEPS), "--redundancy", str(GROUPS), "--pieces", str(PIECES), "--piece-s", "0.005")


@pytest.fixture(scope="module")
def failure_free() -> dict[str, str]:
    """Position -> digest of the weights of the run without failures."""
    return {str(position): digest for position, digest in enumerate(failure_free_pipeline(STEPS, GROUPS, PIECES)[-1])}


def same_as_failure_free(job: Job, failure_free: dict[str, str], survivors: int) -> None:
    """Every surviving rank has the weights of the run without failures."""
    digests = toy_digests(job.run_dir)
    assert len(digests) == 2 * survivors, digests
    for name, digest in digests.items():
        assert digest == failure_free[name.rpartition("-")[2]], f"{name} differs from the run without failures"


def check_twice(lines: list[dict]) -> None:
    """Pieces were computed twice only in steps that lost a group."""
    for line in lines:
        if line["recovery"] is None:
            assert line["pieces_computed"] == line["pieces"], line


def lost(lines: list[dict]) -> list[int]:
    return [group for line in lines if line["recovery"] for group in line["recovery"]["lost_groups"]]


@pytest.mark.parametrize(
    "position", [None, pytest.param(0, marks=pytest.mark.full), 1], ids=["group", "leader", "rank1"]
)
def test_a_death_at_each_point_of_the_step(tmp_path: Path, failure_free: dict[str, str], position: int | None) -> None:
    where = "" if position is None else f",position={position}"
    inject = [
        f"sigkill:group={group}{where},step={step},at={point}"
        for group, step, point in ((0, 3, "forward"), (1, 6, "backward"), (2, 9, "reduce"), (3, 12, "vote"))
    ]
    job = launch(tmp_path, *WORDS, groups=GROUPS, inject=inject)
    lines = job.finish()
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert lost(lines) == [0, 1, 2, 3]
    check_twice(lines)
    same_as_failure_free(job, failure_free, survivors=1)


def test_deaths_in_apply_rebuild_and_patch_and_two_in_one_step(tmp_path: Path, failure_free: dict[str, str]) -> None:
    inject = [
        "sigkill:group=0,step=4,at=apply",
        "sigkill:group=1,step=9,at=reduce",
        "sigkill:group=2,position=1,step=9,at=patch",
        "sigkill:group=3,position=0,step=9,at=rebuild",
    ]
    job = launch(tmp_path, *WORDS, groups=GROUPS, inject=inject)
    lines = job.finish()
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    gone = lost(lines)
    assert gone[0] == 0
    assert set(gone) >= {0, 1}
    same_as_failure_free(job, failure_free, survivors=GROUPS - len(gone))


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.full) for seed in (2, 3, 4))])
def test_kills_from_outside_at_random_moments(tmp_path: Path, failure_free: dict[str, str], seed: int) -> None:
    print(f"seed {seed}")
    draw = random.Random(seed)
    job = launch(tmp_path, *WORDS, *(["--joins"] * (seed % 2)), groups=GROUPS)
    victims = draw.sample(range(GROUPS), GROUPS - 1)
    for number, group in enumerate(victims):
        job.wait_for_step(2 + 3 * number)
        time.sleep(draw.uniform(0, 0.06))
        pids = job.pids(group) if draw.random() < 0.5 else [draw.choice(job.pids(group))]
        job.kill(*pids)
    lines = job.finish()
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert sorted(lost(lines)) == sorted(victims)
    same_as_failure_free(job, failure_free, survivors=1)


def test_a_patch_joins_pipelines_that_still_run(tmp_path: Path) -> None:
    """A piece takes a second, so the survivors are in the first of two when the group's death is known."""
    words = (*WORDS, "--joins", "--piece-s", "0.5", "--steps", "4")
    lines = launch(tmp_path, *words, groups=GROUPS, inject=["sigkill:group=1,step=2,at=forward,n=0"]).finish()
    assert [line["recovery"] and line["recovery"]["pieces_joined"] for line in lines] == [None, 2, None, None]
    assert len(set(toy_digests(tmp_path).values())) == 2, "groups disagree: there are two positions"


def test_the_ticket_stream_outlives_its_connections_and_ends_with_its_group(
    tmp_path: Path, failure_free: dict[str, str]
) -> None:
    """Words of leaders and of position 0 are lost with the connection, which comes back; a leader and a position 0 die
    as they are about to say one."""
    faults = (
        *("leader-0:order.tickets=ECONNRESET,after=9,times=3", "leader-1:order.tickets=ECONNRESET,after=20,times=2"),
        *("rank-4-0:report.begun=ECONNRESET,after=3,times=2", "leader-2:order.tickets=kill,after=30"),
        "rank-3-0:report.begun=kill,after=9",
    )
    patient = ("--grace-s", "6")  # on a busy machine a connection takes a second to be back
    job = launch(tmp_path, *WORDS, *patient, "--joins", groups=GROUPS, environ={VARIABLE: ";".join(faults)})
    lines = job.finish()
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert sorted(lost(lines)) == [2, 3]
    same_as_failure_free(job, failure_free, survivors=3)
