"""N groups train as plain megatron-core data parallelism does: the same loss at every step (issue: parity).

One start of the processes serves all cases of its size: each rank first trains the plain reference over the whole
world, then the same case as a rank of its group.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.spawn import run_ranks

TOLERANCE = 1e-5
SEED = 1234

BASE: dict[str, Any] = {
    "groups": 2,
    "tensor": 1,
    "pipeline": 1,
    "virtual": None,
    "inner_data": 1,
    "expert": 1,
    "micro_batch_size": 2,
    "global_batch_size": 16,
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


CASES = {
    "PP2": case(pipeline=2),
}


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
    for rank, result in enumerate(results):
        for step, (plain, ours) in enumerate(zip(result[name]["plain"], result[name]["ours"], strict=True), 1):
            for key in ("loss", "grad_norm"):
                assert ours[key] == pytest.approx(plain[key], rel=TOLERANCE), f"{name} rank {rank} step {step} {key}"
            assert ours["lr"] == plain["lr"]


@pytest.fixture(scope="module")
def four_ranks() -> list[Any]:
    return run_ranks("tests.megatron.test_parity:both", [CASES] * 4)


@pytest.mark.parametrize("name", CASES)
def test_loss_equals_plain_megatron_core(four_ranks: list[Any], name: str) -> None:
    print(f"seed {SEED}")
    compare(name, four_ranks)
    losses = [step["loss"] for step in four_ranks[0][name]["plain"]]
    assert losses[-1] < losses[0]
