"""Groups of real Megatron ranks die inside the step: the loss of every step is that of the run without failures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.process.harness import Job, launch

STEPS = 6
FLAGS = (
    *("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "32"),
    *("--max-position-embeddings", "32", "--micro-batch-size", "1", "--lr", "1e-3", "--clip-grad", "1.0"),
    *("--train-iters", str(STEPS), "--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "127"),
    *("--attention-dropout", "0.1", "--hidden-dropout", "0.1", "--log-interval", "1", "--split", "90,5,5"),
    *("--eval-interval", "4", "--eval-iters", "1", "--num-workers", "0"),
    *(
        "--spare-heartbeat-timeout-s",
        "60",
    ),  # the launcher tells of the deaths; a rank that a busy machine starves is none
)
PP2 = ("--pipeline-model-parallel-size", "2")
TP2_PP2 = (*PP2, "--tensor-model-parallel-size", "2")
LAYOUTS = {
    "PP2x4": (4, 3, (*PP2, "--global-batch-size", "16")),
    "PP2x3": (3, 1, (*PP2, "--global-batch-size", "6")),
    "TP2xPP2x3": (
        3,
        1,
        (*PP2, "--tensor-model-parallel-size", "2", "--sequence-parallel", "--global-batch-size", "6"),
    ),
}
"""Groups, redundancy, flags. Without redundancy the survivors adopt what a lost group hosted."""
TOLERANCE = 1e-5
"""Relative, of a step's loss: the order of fp32 additions differs after a failure."""


def train(
    run_dir: Path, groups: int, redundancy: int, flags: tuple[str, ...], *inject: str
) -> tuple[Job, list[dict[str, Any]]]:
    """One job through spare-launch to its end."""
    alone = ("--spare-piece-microbatches", "1") if groups == 1 else ()  # as several groups choose
    words = (*FLAGS, *flags, *alone, "--spare-redundancy", str(redundancy))
    shape: dict[str, Any] = {"groups": groups, "group_size": None}
    job = launch(run_dir, *words, **shape, script="pretrain_gpt.py", inject=inject)
    return job, job.finish(timeout_s=240)


@pytest.fixture(
    scope="module",
    params=["PP2x3", *(pytest.param(layout, marks=pytest.mark.full) for layout in ("PP2x4", "TP2xPP2x3"))],
)
def failure_free(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, list[dict[str, Any]]]:
    """A layout and the metrics of one group that has no other groups."""
    _, lines = train(tmp_path_factory.mktemp("failure-free"), 1, 1, LAYOUTS[request.param][2])
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    return request.param, lines


@pytest.mark.timeout(600)
def test_two_groups_die_and_every_loss_is_the_same(
    tmp_path: Path, failure_free: tuple[str, list[dict[str, Any]]]
) -> None:
    layout, expected = failure_free
    inject = ("sigkill:group=1,step=2,at=reduce", "sigkill:group=2,position=1,step=5,at=backward,n=1")
    groups, redundancy, flags = LAYOUTS[layout]
    staged = tmp_path / "staged"
    flags += ("--spare-stage-command", f"echo {{shard}} >> {staged}")
    job, lines = train(tmp_path / "run", groups, redundancy, flags, *inject)
    assert (set(staged.read_text().split()) if staged.exists() else set()) == ({"1", "2"} if redundancy == 1 else set())
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["recovery"]["lost_groups"] for line in lines if line["recovery"]] == [[1], [2]]
    for line, other in zip(lines, expected, strict=True):
        assert line["loss"] == pytest.approx(other["loss"], rel=TOLERANCE), f"step {line['step']}"
        assert line["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4), f"step {line['step']}"
        assert (line["lr"], line["tokens"]) == (other["lr"], other["tokens"])
    values = [(line["step"], line["validation"]["lm loss"]) for line in lines if "validation" in line]
    others = [line["validation"]["lm loss"] for line in expected if "validation" in line]
    assert [step for step, _ in values] == [5]
    assert [value for _, value in values] == pytest.approx(others, rel=TOLERANCE)
    assert "validation loss" in (job.run_dir / "launch.out").read_text()
