"""Checkpoints between this framework and plain megatron-core with its distributed optimizer, both ways, in mid-run.

Plain megatron-core trains on four ranks (two data-parallel ones) and saves step SAVED; groups resume it. Groups train
and save; plain megatron-core resumes, with the distributed optimizer and without. All must go on as the others did.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.megatron.test_checkpointing import SAVED, STEPS, run
from tests.megatron.test_parity import BALANCED, case
from tests.spawn import run_ranks

pytestmark = pytest.mark.timeout(400)

DENSE = {"steps": STEPS, "transformer": {"gated_linear_unit": True, "num_query_groups": 2}, "distributed": True}
HALF = {"steps": STEPS, "transformer": {"bf16": True}, "tied": False, "distributed": True}
EXPERTS = {"steps": STEPS, "transformer": BALANCED, "distributed": True}
PLAIN = {
    "dense": case(pipeline=2, **DENSE),
    "half": case(pipeline=2, virtual=2, **HALF),
    "experts": case(inner_data=2, expert=2, **EXPERTS),
}
RESUMED = {
    ("dense", "dp_reshardable"): {"PP2": case(pipeline=2, **DENSE)},
    ("dense", "fully_reshardable"): {"PP2": case(pipeline=2, **DENSE), "TP2": case(tensor=2, **DENSE)},
    ("half", "dp_reshardable"): {"PP2 x V2": case(pipeline=2, virtual=2, **HALF)},
    ("half", "fully_reshardable"): {"N2 x D2": case(inner_data=2, **HALF)},
    ("experts", "dp_reshardable"): {"EP2": case(inner_data=2, expert=2, **EXPERTS)},
    ("experts", "fully_reshardable"): {"EP2": case(inner_data=2, expert=2, **EXPERTS)},
}


def worker(rank: int, store: Any, directory: str) -> dict[str, Any]:
    from torch.distributed import PrefixStore

    from spare_megatron.config.errors import ConfigError
    from tests.megatron import plain_sharded

    result: dict[str, Any] = {}
    for kind, one in PLAIN.items():
        forms = [form for name, form in RESUMED if name == kind]
        with plain_sharded.world(rank, 4, PrefixStore(f"{kind} plain", store), one):
            told = plain_sharded.train(one, {f"{directory}/{kind} {form}": form for form in forms}, SAVED)
        result[f"{kind} plain"] = told
        ours = f"{directory}/{kind} ours"
        result[f"{kind} ours"] = run(rank, PrefixStore(f"{kind} ours", store), one, None, ours)
        for form in forms:
            for layout, other in RESUMED[kind, form].items():
                start = f"{directory}/{kind} {form}"
                name = f"{kind} {form} {layout}"
                result[name] = run(rank, PrefixStore(name, store), other, start, f"{start} {layout} again")
        for shared in (True, False):
            name = f"{kind} ours to plain {shared}"
            with plain_sharded.world(rank, 4, PrefixStore(name, store), one):
                result[name] = plain_sharded.resume({**one, "distributed": shared}, ours)
    other, start = case(groups=4, **DENSE), f"{directory}/dense dp_reshardable"
    with pytest.raises(ConfigError, match="in the buckets of 2 model-parallel ranks, this layout has 1"):
        run(rank, PrefixStore("refused", store), other, start, f"{directory}/refused")
    return result


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory: Path = tmp_path_factory.mktemp("sharded")
    return run_ranks("tests.megatron.test_distributed_state:worker", [str(directory)] * 4, timeout_s=380.0)[0]


def compare(expected: list[dict[str, float]], got: list[dict[str, float]], kind: str) -> None:
    assert len(expected) == len(got) == STEPS - SAVED
    tolerance = 1e-5 if kind != "half" else 5e-3
    for a, b in zip(expected, got, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=tolerance)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=10 * tolerance)
        assert b["lr"] == a["lr"]


@pytest.mark.parametrize(
    ("kind", "form", "layout"), [(kind, form, layout) for (kind, form), those in RESUMED.items() for layout in those]
)
def test_a_plain_checkpoint_resumes_here(results: dict[str, Any], kind: str, form: str, layout: str) -> None:
    compare(results[f"{kind} plain"][SAVED:], results[f"{kind} {form} {layout}"], kind)


@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("shared", [True, False], ids=["distributed optimizer", "plain optimizer"])
def test_ours_resumes_in_plain_megatron_core(results: dict[str, Any], kind: str, shared: bool) -> None:
    compare(results[f"{kind} ours"][SAVED:], results[f"{kind} ours to plain {shared}"], kind)
