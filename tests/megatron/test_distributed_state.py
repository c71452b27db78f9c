"""Checkpoints between this framework and plain megatron-core with its distributed optimizer, both ways, in mid-run.

Plain megatron-core trains on four ranks (two data-parallel ones) and saves step SAVED in both of its forms; groups
resume it. Groups train and save; plain megatron-core resumes, with the distributed optimizer and without. All must go
on as the others did. The loss of the second step after the save shows the optimizer's state.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from tests.megatron.test_checkpointing import SAVED, STEPS, run
from tests.megatron.test_parity import BALANCED, case
from tests.spawn import run_ranks

pytestmark = pytest.mark.timeout(400)

TOLERANCE = 1e-5
"""Relative, of a step's loss, also in bf16."""

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


def worker(rank: int, store: Any, arguments: tuple[str, str]) -> dict[str, Any]:
    """Histories of one kind by name, on every rank."""
    from torch.distributed import PrefixStore

    from tests.megatron import plain_reference, plain_sharded

    kind, directory = arguments
    one, forms = PLAIN[kind], [form for name, form in RESUMED if name == kind]
    result: dict[str, Any] = {}
    with plain_reference.world(rank, 4, PrefixStore("plain", store), one, timeout_s=120):
        result["plain"] = plain_sharded.train(one, {f"{directory}/{form}": form for form in forms}, SAVED)
    result["ours"] = run(rank, PrefixStore("ours", store), one, None, f"{directory}/ours")
    for form in forms:
        for layout, other in RESUMED[kind, form].items():
            name, start = f"{form} {layout}", f"{directory}/{form}"
            result[name] = run(rank, PrefixStore(name, store), other, start, f"{start} {layout} again", shards=None)
    for shared in (True, False):
        name = f"ours to plain {shared}"
        with plain_reference.world(rank, 4, PrefixStore(name, store), one, timeout_s=120):
            result[name] = plain_sharded.resume({**one, "distributed": shared}, f"{directory}/ours")
    if kind == "dense":
        refused(rank, PrefixStore("refused", store), f"{directory}/dp_reshardable")
    return result


def refused(rank: int, store: Any, start: str) -> None:
    """Buckets belong to a layout, and one of four groups is another."""
    from spare_megatron.config.errors import ConfigError

    with pytest.raises(ConfigError, match="in the buckets of 2 model-parallel ranks, but this layout has 1"):
        run(rank, store, case(groups=4, **DENSE), start, f"{start}-refused")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """What a kind's processes found; they run once."""

    @functools.cache
    def found(kind: str) -> dict[str, Any]:
        directory = tmp_path_factory.mktemp(kind)
        tasks = [(kind, str(directory))] * 4
        reported: dict[str, Any] = run_ranks("tests.megatron.test_distributed_state:worker", tasks, timeout_s=380.0)[0]
        return reported

    return found


def compare(expected: list[dict[str, float]], got: list[dict[str, float]], kind: str) -> None:
    assert len(expected) == len(got) == STEPS - SAVED
    worst = max(abs(b["loss"] / a["loss"] - 1) for a, b in zip(expected, got, strict=True))
    print(f"{kind}: losses of steps {SAVED + 1} to {STEPS} differ by {worst:.1e} at most, relative")
    for a, b in zip(expected, got, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=TOLERANCE)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=10 * TOLERANCE)
        assert b["lr"] == a["lr"]


def marked(kind: str, *values: str) -> Any:
    """All but the plainest kind are for the long run."""
    return pytest.param(kind, *values, marks=() if kind == "dense" else pytest.mark.full)


@pytest.mark.parametrize(
    ("kind", "form", "layout"), [marked(*key, layout) for key, layouts in RESUMED.items() for layout in layouts]
)
def test_a_plain_checkpoint_resumes_here(results: Any, kind: str, form: str, layout: str) -> None:
    compare(results(kind)["plain"][SAVED:], results(kind)[f"{form} {layout}"], kind)


@pytest.mark.parametrize("kind", [marked(kind) for kind in PLAIN])
@pytest.mark.parametrize("shared", [True, False], ids=["distributed optimizer", "plain optimizer"])
def test_ours_resumes_in_plain_megatron_core(results: Any, kind: str, shared: bool) -> None:
    compare(results(kind)["ours"][SAVED:], results(kind)[f"ours to plain {shared}"], kind)
