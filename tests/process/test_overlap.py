"""Deaths while the reduction overlaps the backward pass: the weights are those of the run without overlap or failure.

The toy model has four matrices on each rank, and each takes a while in the backward pass, so buckets travel meanwhile;
one matrix gets no gradient from every third piece (tests/process/toy_engine.py).
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from tests.process.harness import Job, launch, toy_digests
from tests.process.returning import failure_free_pipeline

GROUPS, STEPS, PIECES = 5, 16, 2
OVERLAP = (
    *("--steps", str(STEPS), "--redundancy", str(GROUPS), "--pieces", str(PIECES), "--layers", "4"),
    *("--layer-s", "0.004", "--overlap"),
)


def by_position(job: Job, survivors: int) -> dict[str, set[str]]:
    """Position -> digests of the weights that the survivors hold."""
    digests = toy_digests(job.run_dir)
    assert len(digests) == 2 * survivors, digests
    found: dict[str, set[str]] = {}
    for name, digest in digests.items():
        found.setdefault(name.rpartition("-")[2], set()).add(digest)
    return found


@pytest.fixture(scope="module")
def plain() -> dict[str, set[str]]:
    """Of the run without overlap and without failures."""
    return {
        str(position): {one} for position, one in enumerate(failure_free_pipeline(STEPS, GROUPS, PIECES, layers=4)[-1])
    }


def test_buckets_leave_early_and_the_weights_are_the_same(tmp_path: Path, plain: dict[str, set[str]]) -> None:
    job = launch(tmp_path, *OVERLAP, groups=GROUPS)
    lines = job.finish()
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert by_position(job, GROUPS) == plain
    assert max(line["buckets_early"] for line in lines) > 0, "nothing was ever summed while the backward pass ran"


@pytest.mark.parametrize("position", [pytest.param(None, marks=pytest.mark.full), 1], ids=["group", "rank1"])
def test_a_death_at_each_point_of_the_step(tmp_path: Path, plain: dict[str, set[str]], position: int | None) -> None:
    where = "" if position is None else f",position={position}"
    inject = [
        f"sigkill:group={group}{where},step={step},at={point}"
        for group, step, point in ((0, 3, "forward"), (1, 6, "backward"), (2, 9, "reduce,n=1"), (3, 12, "vote"))
    ]
    job = launch(tmp_path, *OVERLAP, groups=GROUPS, inject=inject)
    lines = job.finish()
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert by_position(job, 1) == plain


@pytest.mark.timeout(240)
def test_deaths_in_the_overlapped_reductions_of_a_step_and_of_its_patches(
    tmp_path: Path, plain: dict[str, set[str]]
) -> None:
    """Group 1 is late in step 9, so the others' buckets wait for its own, and it dies between two of them, a second
    apart; whichever of the groups 0, 2 and 3 is to patch dies as it begins to."""
    inject = ["slow=20x:group=1,position=1,step=9", "sigkill:group=1,position=1,step=9,at=reduce,n=0"]
    inject += [f"sigkill:group={group},position=1,step=9,at=patch" for group in (0, 2, 3)]
    words = (*OVERLAP, "--layer-s", "0.05")
    job = launch(tmp_path, *words, groups=GROUPS, inject=inject)
    lines = job.finish(timeout_s=200)  # perhaps of one group, with the pieces of all
    log = (tmp_path / "logs" / "group-1" / "rank-1.log").read_text().splitlines()
    assert [line for line in log if line.startswith("step 9:")][-1] != "step 9: all is computed", "it died too late"
    gone = [group for line in lines if line["recovery"] for group in line["recovery"]["lost_groups"]]
    assert 1 in gone
    assert len(gone) > 1, "nobody died in a patch"
    assert by_position(job, GROUPS - len(gone)) == plain


@pytest.mark.full  # moments of kills are drawn in test_masking and the soak too
@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_kills_from_outside_at_random_moments(tmp_path: Path, plain: dict[str, set[str]], seed: int) -> None:
    print(f"seed {seed}")
    draw = random.Random(seed)
    job = launch(tmp_path, *OVERLAP, groups=GROUPS)
    victims = draw.sample(range(GROUPS), GROUPS - 1)
    for number, group in enumerate(victims):
        job.wait_for_step(2 + 3 * number)
        time.sleep(draw.uniform(0, 0.06))
        job.kill(*(job.pids(group) if draw.random() < 0.5 else [draw.choice(job.pids(group))]))
    lines = job.finish()
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    gone = [group for line in lines if line["recovery"] for group in line["recovery"]["lost_groups"]]
    assert sorted(gone) == sorted(victims)
    assert by_position(job, 1) == plain
