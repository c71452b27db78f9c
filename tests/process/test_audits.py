"""Audits on real processes: a wrong gradient is found before its step is committed, its group named, no trace left.

The toy model's sums are exact in any order (tests/process/toy_engine.py), so weights must be bit for bit those of the
run without a fault.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.process.harness import Job, launch, toy_digests
from tests.process.returning import failure_free_pipeline

GROUPS, STEPS, PIECES = 4, 12, 2
WORDS = (
    *("--steps", str(STEPS), "--redundancy", str(GROUPS), "--pieces", str(PIECES), "--layers", "2"),
    *("--piece-s", "0.005"),
)


@pytest.fixture(scope="module")
def failure_free() -> dict[str, str]:
    """Position -> digest of the weights of the run without audits and faults."""
    return {
        str(position): one for position, one in enumerate(failure_free_pipeline(STEPS, GROUPS, PIECES, layers=2)[-1])
    }


def same_as_failure_free(job: Job, failure_free: dict[str, str], survivors: int) -> None:
    """Every surviving rank has the weights of the run without faults."""
    digests = toy_digests(job.run_dir)
    assert len(digests) == 2 * survivors, digests
    for name, digest in digests.items():
        assert digest == failure_free[name.rpartition("-")[2]], f"{name} differs from the run without faults"


def test_a_wrong_gradient_is_found_named_and_leaves_no_trace(tmp_path: Path, failure_free: dict[str, str]) -> None:
    inject = ("bitflip:group=1,position=1,step=4,at=gradient,n=1", "bitflip:group=2,position=0,step=8,at=gradient,n=0")
    job = launch(tmp_path, *WORDS, "--audit-rate", "1", groups=GROUPS, inject=inject)
    lines = job.finish()
    reported = (tmp_path / "launch.out").read_text()
    assert "found different gradients of piece 3 in step 4" in reported
    assert "group 1 (rank 1) corrupt: its gradient of piece 3 in step 4 differs from that of groups" in reported
    assert ": in matrix" in reported
    lost = [(line["step"], line["recovery"]["lost_groups"]) for line in lines if line["recovery"]]
    assert lost == [(4, [1]), (8, [2])]
    same_as_failure_free(job, failure_free, survivors=2)


def test_deaths_raise_no_false_alarm(tmp_path: Path, failure_free: dict[str, str]) -> None:
    inject = ("sigkill:group=3,step=3,at=backward,n=1", "sigkill:group=0,position=1,step=7,at=vote")
    job = launch(tmp_path, *WORDS, "--audit-rate", "0.5", groups=GROUPS, inject=inject)
    lines = job.finish()
    assert [line["recovery"]["lost_groups"] for line in lines if line["recovery"]] == [[3], [0]]
    assert sum(line["pieces_audited"] for line in lines) > STEPS
    assert "corrupt" not in (tmp_path / "launch.out").read_text()
    same_as_failure_free(job, failure_free, survivors=2)


def test_a_result_that_differs_between_groups_is_reduced_once_more(
    tmp_path: Path, failure_free: dict[str, str]
) -> None:
    job = launch(tmp_path, *WORDS, groups=GROUPS, inject=("bitflip:group=1,position=1,step=4,at=reduce",))
    lines = job.finish()
    assert "the reduced results of step 4 differ between groups" in (tmp_path / "launch.out").read_text()
    assert not any(line["recovery"] and line["recovery"]["lost_groups"] for line in lines)
    assert [(line["step"], line["buckets_early"]) for line in lines] == [(step, 0) for step in range(1, STEPS + 1)]
    same_as_failure_free(job, failure_free, survivors=GROUPS)


def test_two_hosts_cannot_decide(tmp_path: Path) -> None:
    words = ("--steps", "6", "--redundancy", "2", "--pieces", "2", "--audit-rate", "1")
    job = launch(tmp_path, *words, groups=2, inject=("bitflip:group=1,position=0,step=3,at=gradient,n=0",))
    job.finish(code=1)
    reported = (tmp_path / "launch.out").read_text()
    assert "groups 0 and 1 found different gradients of piece 2 in step 3, no majority agrees" in reported
    assert "there is no checkpoint" in reported
