"""Pieces of several microbatches: summed in fp32 as megatron-core sums them, then rounded once, the same everywhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spare_megatron.collectives.converting import results_of
from tests.megatron.test_exact import FLAGS, STEPS, reported, train
from tests.megatron.test_parity import BALANCED, SEED, case
from tests.process.harness import launch
from tests.spawn import run_ranks
from tests.tickets import run_of

DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
HALF = {"bf16": True, "params_dtype": "bfloat16"}


def one_group(**changes: Any) -> dict[str, Any]:
    return case(groups=1, steps=2, reduce="exact", **changes)


CASES = {
    "PP2 x V2": one_group(pipeline=2, virtual=2, micro_batch_size=1, transformer=DROPOUT, piece_microbatches=4),
    "PP2, loss per token": one_group(
        pipeline=2, transformer={**DROPOUT, "calculate_per_token_loss": True}, piece_microbatches=2
    ),
    # untied: on one stage exact sums add the two gradients of a tied weight at the end, megatron-core in each pass
    "MoE, EP2": one_group(
        inner_data=2,
        expert=2,
        micro_batch_size=1,
        tied=False,
        transformer={**BALANCED, **DROPOUT},
        piece_microbatches=2,
    ),
    "PP2, 32 bits": {**one_group(pipeline=2, piece_microbatches=2), "reduce": "exact32"},
}


def worker(rank: int, store: Any, _: Any) -> dict[str, Any]:
    """On both ranks of one group: for each case, how many sums differ from the rounded sums of megatron-core's own
    accumulation, and the digests of two runs that compute their pieces in other orders and segments."""
    from torch.distributed import PrefixStore

    return {name: checked(rank, PrefixStore(name, store), one) for name, one in CASES.items()}


def checked(rank: int, store: Any, one: dict[str, Any]) -> dict[str, Any]:
    from torch.distributed import PrefixStore

    from spare_megatron.megatron_adapter.model import world
    from tests.megatron import groups

    number = groups.shape_of(one).pieces
    pieces = list(range(number))
    try:
        engine = groups.engine_of({**one, "reduce": "fp32"}, rank, PrefixStore("fp32", store))
        plain = [accumulated(engine, piece) for piece in pieces]
    finally:
        world.destroy()
    result: dict[str, Any] = {"digests": [], "losses": []}
    for index, segments in enumerate([[pieces], [pieces[:0:-1], pieces[:1]]]):
        try:
            engine = groups.engine_of(one, rank, PrefixStore(f"{index}", store))
            if index == 0 and one["reduce"] == "exact":
                result["different"] = different(engine, plain, pieces)
            losses = []
            for step in range(1, one["steps"] + 1):
                engine.begin_step(step)
                for segment in segments:
                    engine.run(step, run_of(segment))
                tensors = results_of(engine.conversion(), engine.local_sum())
                losses.append(engine.apply(step, tensors, engine.scalars())["loss"])
            result["digests"].append(engine.weights_digest())
            result["losses"].append(losses)
        finally:
            world.destroy()
    return result


def accumulated(engine: Any, piece: int) -> list[Any]:
    """The gradient buffers in which megatron-core has summed the microbatches of one piece."""
    from spare_megatron.megatron_adapter.model.gradient_overlap import gradient_buffers

    engine.begin_step(1)
    engine.run(1, run_of([piece]))
    return [buffer.grad_data.clone() for _, buffer, _ in gradient_buffers(engine.replica)]


def different(engine: Any, plain: list[list[Any]], pieces: list[int]) -> int:
    """Number of elements of the engine's sums that are not the sum of ``plain``, rounded piece by piece."""
    import torch
    import torch.distributed as dist

    from spare_megatron.megatron_adapter.model.gradient_overlap import gradient_buffers

    engine.begin_step(1)
    exponents = iter(engine.exact.format.scales.exponents(0))
    engine.run(1, run_of(pieces))
    found, wrong, seen = engine.local_sum(), 0, 0
    for number, (_, buffer, group) in enumerate(gradient_buffers(engine.replica)):
        for start, stop, _ in sorted(buffer.param_index_map.values()):
            unit = 2.0 ** next(exponents)
            rounded = sum(torch.round(one[number][start:stop].double() * unit).long() for one in plain)
            dist.all_reduce(rounded, group=group)
            wrong += int((found[number][start:stop] != rounded).sum())
            seen += int(rounded.count_nonzero())
    assert seen > 1000, "there are gradients to compare"
    return wrong


@pytest.fixture(scope="module")
def results(once: Callable[..., Any]) -> list[Any]:
    print(f"seed {SEED}")
    found: list[Any] = once("pieces", lambda: run_ranks("tests.megatron.test_pieces:worker", [None, None]))
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CASES)
def test_a_piece_is_megatrons_sum_rounded_once_in_any_order(results: list[Any], name: str) -> None:
    for one in (result[name] for result in results):
        assert one.get("different", 0) == 0
        first, second = one["digests"]
        assert first
        assert first == second
        assert one["losses"][0] == pytest.approx(one["losses"][1], rel=1e-12)


INTERLEAVED = (
    *("--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "2", "--num-layers", "4"),
    *("--spare-piece-microbatches", "2", "--global-batch-size", "8"),
    *("--spare-audit-rate", "0.5", "--overlap-grad-reduce"),
)
TENSOR = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
EXPERTS = (
    *("--num-experts", "4", "--expert-model-parallel-size", "2", "--moe-router-topk", "2", "--disable-bias-linear"),
    *("--bf16", "--moe-router-enable-expert-bias", "--moe-router-score-function", "sigmoid"),
    *("--global-batch-size", "24", "--rampup-batch-size", "12", "12", "36", "--spare-piece-microbatches", "2"),
)
"""2 groups of D2: a shard has 3 microbatches and then 6, so in the first steps its second piece is a short one."""


@pytest.mark.timeout(300)
def test_a_checkpoint_of_other_pieces_goes_on_and_says_so(tmp_path: Path) -> None:
    batch = ("--global-batch-size", "4")
    train(tmp_path / "two", 1, (*batch, "--spare-piece-microbatches", "2"))
    words = (*FLAGS, *batch, "--spare-piece-microbatches", "4", "--train-iters", str(STEPS + 1))
    words = (*words, "--load", str(tmp_path / "two" / "save"), "--override-opt_param-scheduler")
    job = launch(tmp_path / "four", *words, groups=1, group_size=None, script="pretrain_gpt.py")
    assert [line["step"] for line in job.finish(timeout_s=200)] == [STEPS + 1]
    output = "".join(path.read_text() for path in (tmp_path / "four" / "logs").rglob("*") if path.is_file())
    assert "of a run with --spare-piece-microbatches 2 and this run has 4" in output


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "flags",
    [INTERLEAVED, *(pytest.param(flags, marks=pytest.mark.full) for flags in (EXPERTS, (*INTERLEAVED, *TENSOR)))],
    ids=["PP2 x V2, 2 microbatches, audits", "MoE EP2 D2 bf16, 2 microbatches, growing batch", "TP2 x PP2 x V2"],
)
def test_a_masked_failure_leaves_no_trace(tmp_path: Path, flags: tuple[str, ...]) -> None:
    assert "0.1" in FLAGS, "with dropout"
    _, failure_free = train(tmp_path / "failure-free", 2, flags)
    job, killed = train(tmp_path / "killed", 2, flags, "sigkill:group=1,step=3,at=backward,n=0")
    assert "patched by 1 group" in reported(job)
    assert killed == failure_free
