"""Audits on real Megatron jobs: a flipped bit in a piece's gradient is found before its step is committed.

Each run saves its last step; the sha256 over all weights and optimizer moments must equal that of the run without
audits and faults.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.megatron.test_exact import DENSE, EXPERTS, reported, train

INTERLEAVED = (
    *("--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "2", "--num-layers", "4"),
    *("--global-batch-size", "12", "--recompute-granularity", "full", "--recompute-method", "uniform"),
    *("--recompute-num-layers", "1"),
)


@pytest.mark.timeout(600)
def test_a_wrong_gradient_is_found_and_leaves_no_trace(tmp_path: Path, dense: str) -> None:
    inject = "bitflip:group=1,position=1,step=4,at=gradient,n=1"
    job, found = train(tmp_path / "flip", 3, (*DENSE, "--spare-audit-rate", "1"), inject)
    assert found == dense
    assert (
        "group 1 (rank 1) corrupt: its gradient of piece 3 in step 4 differs from that of groups 0 and 2"
        in reported(job)
    )


@pytest.mark.full
@pytest.mark.timeout(600)
def test_deaths_raise_no_false_alarm(tmp_path: Path, dense: str) -> None:
    kills = ("sigkill:group=1,step=2,at=reduce", "sigkill:group=0,position=1,step=4,at=backward,n=1")
    job, killed = train(tmp_path / "killed", 3, (*DENSE, "--spare-audit-rate", "0.5"), *kills)
    assert killed == dense
    assert "different gradients" not in reported(job)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("flags", [EXPERTS, INTERLEAVED], ids=["MoE EP2 TP2 bf16", "virtual stages, recomputation"])
@pytest.mark.parametrize("method", ["exact", "exact32"])
def test_audits_see_what_owners_compute(tmp_path: Path, flags: tuple[str, ...], method: str) -> None:
    words = (*flags, "--spare-reduce", method)
    _, failure_free = train(tmp_path / "failure-free", 3, words)
    job, audited = train(
        tmp_path / "audited", 3, (*words, "--spare-audit-rate", "0.6"), "sigkill:group=2,step=4,at=vote"
    )
    assert audited == failure_free
    assert "different gradients" not in reported(job)
