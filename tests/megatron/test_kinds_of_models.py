"""Models with multi-token prediction, and DeepSeek's kind of model, in real jobs: two groups are killed and come back,
and the weights of every step and the losses that are logged are those of the run without failures, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from spare_megatron.checkpoint.folder import last_good
from spare_megatron.megatron_adapter.checkpoint.digest import digest
from tests.megatron import toy
from tests.megatron.test_engine import Group, alone, one_group
from tests.process.harness import Job, launch
from tests.process.returning import RETURNS, check_same, held, leave_whole, voted
from tests.spawn import run_ranks

FLAGS = (
    *("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "32"),
    *("--max-position-embeddings", "32", "--micro-batch-size", "1", "--lr", "1e-3", "--clip-grad", "1.0"),
    *("--train-iters", "2000", "--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "127"),
    *("--attention-dropout", "0.1", "--hidden-dropout", "0.1", "--log-interval", "1", "--split", "90,5,5"),
    *("--eval-interval", "5", "--eval-iters", "1", "--num-workers", "0", "--global-batch-size", "6"),
    *("--position-embedding-type", "rope", "--mtp-num-layers", "1", "--spare-piece-microbatches", "1"),
)
PP2 = ("--pipeline-model-parallel-size", "2", "--untie-embeddings-and-output-weights")
DEEPSEEK = (
    *("--multi-latent-attention", "--q-lora-rank", "32", "--kv-lora-rank", "16", "--qk-head-dim", "16"),
    *("--qk-pos-emb-head-dim", "8", "--v-head-dim", "16", "--qk-layernorm", "--normalization", "RMSNorm", "--swiglu"),
    *("--disable-bias-linear", "--num-experts", "4", "--moe-router-topk", "2", "--moe-layer-freq", "([0]+[1]*1)"),
    *("--moe-ffn-hidden-size", "64", "--moe-shared-expert-intermediate-size", "64", "--moe-token-dispatcher-type"),
    *("alltoall", "--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias", "--rope-type", "rope"),
    *("--moe-router-load-balancing-type", "seq_aux_loss", "--moe-aux-loss-coeff", "1e-4"),
)
LAYOUT = ("--pipeline-model-parallel-layout", "Ett|mL")
MODELS: dict[str, tuple[str, ...]] = {
    "MTP": (),
    "MTP, PP2, layout": (*PP2, *LAYOUT),
    "DeepSeek, PP2, layout": (*PP2, *DEEPSEEK, *LAYOUT),
}
LONG = [pytest.param(model, marks=pytest.mark.full) for model in list(MODELS)[:-1]]
SHOWN = ("loss", "mtp_1 loss", "seq_load_balancing_loss", "grad_norm", "validation")


def killed_and_failure_free(folder: Path, start: Callable[..., Job]) -> tuple[Job, Job]:
    """A job of three groups of which two are killed and come back, and the same of one group without failures: the
    weights of every step, and what both save at last with the optimizer's state, are equal.

    ``start(run_dir, groups, *flags, inject=)`` starts a job.
    """
    flags = ("--spare-redundancy", "3", *RETURNS)
    inject = (
        "sigkill:group=1,step=2,at=backward,n=0",
        "sigkill:group=2,step=3,at=reduce",
        *(held(4, by=0, until=(group, 1)) for group in (1, 2)),  # else steps that only wait for a return are compared
    )
    job = start(folder / "run", 3, *flags, inject=inject)
    found = leave_whole(job, 3, (1, 1), (2, 1))
    lost = [group for line in job.metrics if line["recovery"] for group in line["recovery"]["lost_groups"]]
    assert lost == [1, 2]
    without = start(folder / "failure-free", 1, "--exit-interval", str(max(found)))
    without.finish(timeout_s=400.0)
    check_same(found, voted(without))
    one, other = (digest(last_good(each.run_dir / "save")[0], optimizer=True) for each in (job, without))
    assert one == other, "weights or optimizer differ"
    return job, without


def train(run_dir: Path, groups: int, *flags: str, model: str, inject: tuple[str, ...] = ()) -> Job:
    words = (*FLAGS, *MODELS[model], *flags, "--save", str(run_dir / "save"), "--save-interval", "1000")
    return launch(run_dir, *words, groups=groups, group_size=None, script="pretrain_gpt.py", inject=inject)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", [*LONG, "DeepSeek, PP2, layout"])
def test_two_kills_and_a_return_change_nothing(tmp_path: Path, model: str) -> None:
    job, failure_free = killed_and_failure_free(tmp_path, partial(train, model=model))
    for line, expected in zip(job.metrics, failure_free.metrics, strict=False):
        assert [line.get(name) for name in SHOWN] == [expected.get(name) for name in SHOWN], f"step {line['step']}"
    assert job.metrics[-1]["mtp_1 loss"] < job.metrics[0]["mtp_1 loss"]
    [lines] = {tuple(line["validation"]) for line in job.metrics if "validation" in line}
    assert lines == ("lm loss",), "megatron-core notes no loss of more tokens where it evaluates"
    assert " mtp_1 loss: " in (job.run_dir / "launch.out").read_text()


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", ["MTP, PP2, layout", "DeepSeek, PP2, layout"])
def test_a_job_that_goes_on_from_a_checkpoint_ends_as_one_that_went_on(tmp_path: Path, model: str) -> None:
    start, steps = partial(train, model=model), ("--train-iters", "8")
    whole = start(tmp_path / "whole", 2, *steps)
    first = start(tmp_path / "first", 2, *steps, "--exit-interval", "4")
    for job in (whole, first):
        job.finish(timeout_s=400.0)
    second = start(tmp_path / "second", 2, *steps, "--load", str(tmp_path / "first" / "save"))
    second.finish(timeout_s=400.0)
    one, other = (digest(last_good(job.run_dir / "save")[0], optimizer=True) for job in (whole, second))
    assert one == other, "weights or optimizer differ"
    assert [line["step"] for line in second.metrics] == [5, 6, 7, 8]
    for line, expected in zip(second.metrics, whole.metrics[4:], strict=True):
        assert [line.get(name) for name in SHOWN] == [expected.get(name) for name in SHOWN], f"step {line['step']}"


ORDERS = ([list(range(4))], [[3, 1], [0, 2]])
KINDS: dict[str, dict[str, Any]] = {
    "MTP of two layers": one_group(positions="rope", reduce="exact", transformer={"mtp_num_layers": 2}),
    "DeepSeek": one_group(positions="rope", reduce="exact", tied=False, transformer=toy.DEEPSEEK),
    "DeepSeek, bf16, more tokens than bf16 counts": {
        **one_group(positions="rope", reduce="exact", tied=False, transformer={**toy.DEEPSEEK, "bf16": True}),
        "micro_batch_size": 8,
        "global_batch_size": 32,
    },
}


def digests(rank: int, store: Any, _: Any) -> dict[str, list[str]]:
    """The weights after two steps of one rank that computes its pieces in two orders."""
    from torch.distributed import PrefixStore

    result: dict[str, list[str]] = {}
    for name, one in KINDS.items():
        for index, segments in enumerate(ORDERS):
            with Group(one, rank, PrefixStore(f"{name}{index}", store)) as engine:
                for step in (1, 2):
                    alone(engine, step, segments)
                result.setdefault(name, []).append(engine.weights_digest())
    return result


@pytest.mark.timeout(300)
def test_gradients_of_a_piece_have_the_same_bits_in_any_order() -> None:
    [found] = run_ranks("tests.megatron.test_kinds_of_models:digests", [None])
    for name, (one, other) in found.items():
        assert one == other, name
