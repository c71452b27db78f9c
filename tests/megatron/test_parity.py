"""N groups train as plain megatron-core data parallelism does: the same loss at every step (issue: parity).

One start of the processes serves all cases of its size: each rank first trains the plain reference over the whole
world, then the same case as a rank of its group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from spare_megatron.flags.hybrid_pattern import CORE
from spare_megatron.megatron_adapter.versions import release
from tests.megatron import toy
from tests.spawn import run_ranks

pytestmark = pytest.mark.timeout(300)

TOLERANCE = 1e-5
SEED = 1234

BASE: dict[str, Any] = {
    "groups": 2,
    "tensor": 1,
    "pipeline": 1,
    "virtual": None,
    "inner_data": 1,
    "piece_microbatches": 1,
    "reduce": "fp32",
    "expert": 1,
    "micro_batch_size": 2,
    "global_batch_size": 8,
    "steps": 10,
    "seed": SEED,
    "tied": True,
    "convention": "tokens",
    "transformer": {},
    "loads": None,
    "cut": 0,
}


def case(**changes: Any) -> dict[str, Any]:
    return {**BASE, **changes}


MOE = {**toy.MOE, "num_moe_experts": 4}
BALANCED = {
    **MOE,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.01,
}

FOUR_RANKS = {
    "1x1x4": case(groups=4),
    "TP2": case(tensor=2),
    "TP2, sequence parallel, untied, SwiGLU, RMSNorm": case(
        tensor=2,
        tied=False,
        transformer={
            "sequence_parallel": True,
            "gated_linear_unit": True,
            "normalization": "RMSNorm",
            "add_bias_linear": False,
        },
    ),
    "PP2": case(pipeline=2),
    "PP2, older loss convention": case(pipeline=2, convention="mean"),
    "PP2, loss per token": case(pipeline=2, transformer={"calculate_per_token_loss": True}),
    "PP2, uneven loads in two segments": case(pipeline=2, loads=[1, 3], cut=2),
    "PP2, virtual stages": case(pipeline=2, virtual=2),
    "PP2, virtual stages, uneven loads": case(pipeline=2, virtual=2, loads=[1, 3], cut=1),
    "D2": case(inner_data=2, micro_batch_size=1, loads=[3, 1]),
    "MoE, EP2": case(inner_data=2, micro_batch_size=1, expert=2, transformer=MOE),
    "MoE, EP2, expert bias": case(inner_data=2, micro_batch_size=1, expert=2, transformer=BALANCED, loads=[1, 3]),
    "MTP": case(groups=4, positions="rope", transformer={"mtp_num_layers": 1}),
    "MTP of two layers, PP2, untied, uneven loads": case(
        pipeline=2, tied=False, positions="rope", transformer={"mtp_num_layers": 2}, loads=[1, 3], cut=2
    ),
    "MTP, PP2, virtual stages, loss per token, pads": case(
        pipeline=2,
        virtual=2,
        positions="rope",
        transformer={"mtp_num_layers": 1, "calculate_per_token_loss": True},
        loads=[1, 3],
    ),
    "DeepSeek's kind of model, PP2": case(pipeline=2, tied=False, positions="rope", transformer=toy.DEEPSEEK),
    "MoE, PP2, virtual stages, pads": case(pipeline=2, virtual=2, transformer=BALANCED, loads=[1, 3]),
}
if release() >= CORE:  # else hybrid models are not taken
    EXPERTS = {**MOE, "is_hybrid_model": True}
    FOUR_RANKS |= {
        "hybrid, PP2, uneven stages, uneven loads": case(
            pipeline=2, hybrid="*-*|E", tied=False, transformer={**EXPERTS, "num_layers": 4}, loads=[1, 3], cut=2
        ),
        "hybrid, PP2, virtual stages, pads": case(
            pipeline=2, virtual=2, hybrid="*-|*E|*-|*E", transformer={**EXPERTS, "num_layers": 8}, loads=[1, 3]
        ),
        "hybrid, MTP of two layers, PP2": case(
            pipeline=2,
            hybrid="*-|*E/*-/*-",
            positions="rope",
            transformer={**EXPERTS, "num_layers": 4, "mtp_num_layers": 2},
        ),
    }
EIGHT_RANKS = {"TP2 x PP2": case(tensor=2, pipeline=2)}
CASES = {**FOUR_RANKS, **EIGHT_RANKS}


STEPS = 2
"""The second one has the weights of the first one's update."""
FULL_STEPS = 50
COVERED = (
    *("TP2", "PP2", "PP2, loss per token", "PP2, virtual stages", "MoE, EP2", "MTP"),
    "PP2, virtual stages, uneven loads",
    "hybrid, PP2, uneven stages, uneven loads",
)
"""What they check is checked by a case that has more; the long run trains all."""
SHORT = {name: one for name, one in FOUR_RANKS.items() if name not in COVERED}


def of_steps(cases: dict[str, dict[str, Any]], steps: int) -> dict[str, dict[str, Any]]:
    return {name: {**one, "steps": steps} for name, one in cases.items()}


def both(rank: int, store: Any, cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Run on every rank: history of the plain reference and of this rank's group, for each case."""
    from torch.distributed import PrefixStore

    from tests.megatron import groups, plain_reference

    result = {}
    for name, one in cases.items():
        size = one["groups"] * one["tensor"] * one["pipeline"] * one["inner_data"]
        if rank >= size:
            continue
        plain = plain_reference.train(rank, size, PrefixStore(f"{name}/plain", store), one)
        group, position = divmod(rank, size // one["groups"])
        result[name] = {"plain": plain, "ours": groups.train(group, position, PrefixStore(name, store), one)}
    return result


def compare(name: str, results: list[Any]) -> None:
    print(f"seed {SEED}")
    losses = [step["loss"] for step in results[0][name]["plain"]]
    assert losses[-1] < losses[0], "the reference itself must learn"
    for rank, result in enumerate(results):
        for step, (plain, ours) in enumerate(zip(result[name]["plain"], result[name]["ours"], strict=True), 1):
            for key in plain.keys() - {"lr"}:
                assert ours[key] == pytest.approx(plain[key], rel=TOLERANCE), f"{name} rank {rank} step {step} {key}"
            assert ours["lr"] == plain["lr"]


@pytest.fixture(scope="module")
def four_ranks(once: Callable[..., Any]) -> list[Any]:
    cases = of_steps(SHORT, STEPS)
    found: list[Any] = once("parity", lambda: run_ranks("tests.megatron.test_parity:both", [cases] * 4))
    return found


@pytest.fixture(scope="module")
def eight_ranks() -> list[Any]:
    return run_ranks("tests.megatron.test_parity:both", [of_steps(EIGHT_RANKS, STEPS)] * 8)


@pytest.mark.parametrize("name", SHORT)
def test_loss_equals_plain_megatron_core(four_ranks: list[Any], name: str) -> None:
    compare(name, four_ranks)


@pytest.mark.parametrize("name", EIGHT_RANKS)
def test_loss_equals_plain_megatron_core_on_eight_ranks(eight_ranks: list[Any], name: str) -> None:
    compare(name, eight_ranks)


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("ranks", "cases"), [(4, FOUR_RANKS), (8, EIGHT_RANKS)])
def test_fifty_steps(ranks: int, cases: dict[str, dict[str, Any]]) -> None:
    longer = of_steps(cases, FULL_STEPS)
    results = run_ranks("tests.megatron.test_parity:both", [longer] * ranks, timeout_s=1100.0)
    for name in longer:
        compare(name, results)
