"""Hybrid models (megatron-core 0.19 and newer): the pattern is read as megatron-core reads it, a job of groups survives
kills with the bits of the run without failures, and checkpoints of GPTs of the same layers go on as hybrid models."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spare_megatron.checkpoint.folder import last_good
from spare_megatron.config.errors import ConfigError
from spare_megatron.config.exits import ExitCode
from spare_megatron.flags.hybrid_pattern import CORE, LAYERS, SPARSE, read_pattern
from spare_megatron.megatron_adapter.checkpoint.digest import digest
from spare_megatron.megatron_adapter.shims import install_cpu_shims
from spare_megatron.megatron_adapter.versions import release
from tests.process.harness import Job, launch
from tests.process.returning import RETURNS, check_same, held, leave_whole, voted

SYMBOLS = "".join(sorted({*LAYERS} - {SPARSE}))
FLAGS = (
    *("--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "32", "--max-position-embeddings", "32"),
    *("--micro-batch-size", "1", "--global-batch-size", "12", "--lr", "1e-3", "--clip-grad", "1.0", "--mock-data"),
    *("--tokenizer-type", "NullTokenizer", "--vocab-size", "127", "--attention-dropout", "0.1", "--hidden-dropout"),
    *("0.1", "--log-interval", "1", "--split", "100,0,0", "--eval-iters", "0", "--num-workers", "0"),
    *("--position-embedding-type", "rope", "--spare-piece-microbatches", "1", "--disable-bias-linear"),
)
PATTERN = "*-|*E/*-"
EXPERTS = ("--num-experts", "4", "--moe-router-topk", "2", "--moe-aux-loss-coeff", "1e-2")

pytestmark = pytest.mark.skipif(release() < CORE, reason="hybrid models are taken with a newer megatron-core")


@given(st.text(SYMBOLS + "|/", max_size=12))
def test_it_is_read_as_megatron_core_reads_it(text: str) -> None:
    install_cpu_shims()
    from megatron.core.models.hybrid.hybrid_layer_allocation import parse_hybrid_pattern

    try:
        cores = parse_hybrid_pattern(text)
    except ValueError:
        if "*" not in text or "+" not in text:  # two kinds of attention are refused by check_hybrid
            with pytest.raises(ConfigError):
                read_pattern(text)
        return
    if not (cores.main_pattern or "").replace("|", ""):
        with pytest.raises(ConfigError, match="has no layers"):
            read_pattern(text)
        return
    ours = read_pattern(text)
    assert "|".join(ours.stages) == cores.main_pattern
    assert (ours.predicting, ours.predicted) == (cores.mtp_pattern or "", cores.mtp_num_depths)


def train(
    run_dir: Path, groups: int, *flags: str, script: str = "pretrain_hybrid.py", inject: tuple[str, ...] = ()
) -> Job:
    words = (*FLAGS, *flags, "--save", str(run_dir / "save"), "--save-interval", "1000")
    return launch(run_dir, *words, groups=groups, group_size=None, script=script, inject=inject)


@pytest.mark.timeout(900)
def test_two_kills_and_a_return_change_nothing(tmp_path: Path) -> None:
    model = ("--hybrid-layer-pattern", PATTERN, *EXPERTS, "--pipeline-model-parallel-size", "2")
    model += ("--untie-embeddings-and-output-weights", "--train-iters", "2000")
    inject = (
        "sigkill:group=1,step=2,at=backward,n=1",
        "sigkill:group=2,step=3,at=reduce",
        *(held(4, by=0, until=(group, 1)) for group in (1, 2)),  # else steps that only wait for a return are compared
    )
    flags = (*model, "--spare-redundancy", "3", *RETURNS)
    job = train(tmp_path / "run", 3, *flags, inject=inject)
    found = leave_whole(job, 3, (2, 1))
    failure_free = train(tmp_path / "failure-free", 1, *model, "--exit-interval", str(max(found)))
    failure_free.finish(timeout_s=400.0)
    check_same(found, voted(failure_free))
    one, other = (digest(last_good(job.run_dir / "save")[0], optimizer=True) for job in (job, failure_free))
    assert one == other, "weights or optimizer differ"
    assert job.metrics[-1]["mtp_1 loss"] < job.metrics[0]["mtp_1 loss"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("layers", ["*-", "*E"])
def test_a_gpt_goes_on_as_the_hybrid_model_of_its_layers(tmp_path: Path, layers: str) -> None:
    """Optimizer state and schedule included: both models compute the same operations on the same numbers."""
    experts = EXPERTS if "E" in layers else ()
    gpt, hybrid = ("--num-layers", "2"), ("--hybrid-layer-pattern", layers * 2)
    same = (*experts, "--attention-dropout", "0", "--hidden-dropout", "0", "--lr-decay-iters", "8")
    same += ("--train-iters", "8")
    first = train(tmp_path / "gpt", 1, *gpt, *same, "--exit-interval", "4", script="pretrain_gpt.py")
    first.finish(timeout_s=300.0)
    more = (*same, "--load", str(tmp_path / "gpt" / "save"))
    on = train(tmp_path / "on", 1, *gpt, *more, script="pretrain_gpt.py")
    as_hybrid = train(tmp_path / "hybrid", 2, *hybrid, *more)
    for job in (on, as_hybrid):
        job.finish(timeout_s=300.0)
        assert [line["step"] for line in job.metrics] == [5, 6, 7, 8]
    for line, expected in zip(as_hybrid.metrics, on.metrics, strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-6), f"step {line['step']}"
    load = ("--load", str(tmp_path / "hybrid" / "save"))
    back = train(tmp_path / "back", 1, *gpt, *same, *load, script="pretrain_gpt.py")
    back.finish(code=ExitCode.BAD_INPUT, timeout_s=300.0)
    reported = (back.run_dir / "launch.out").read_text()
    assert "is of a hybrid model, and this one is a GPT; run pretrain_hybrid.py" in reported
