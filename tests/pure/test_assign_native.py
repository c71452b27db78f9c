"""The compiled chains make the plans that Python makes, cell for cell, and Python makes them where there are none."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from spare_megatron.config.errors import ConfigError
from spare_megatron.placement import LayerTables, build_placement
from spare_megatron.protocol import assign_chains, assign_native
from spare_megatron.protocol.assign import Assignment, WipeOut, assign
from spare_megatron.protocol.assign_chains import Chains, IntTable, Shortage
from spare_megatron.protocol.assign_types import USUAL

COMPILED = assign_native.compiled_chains()


class Compared:
    """Decides everything twice, and counts how it ended."""

    def __init__(self) -> None:
        self.plans = self.shortages = self.handed_over = 0

    def run(self, chains: Chains) -> object:
        """Stands in for ``Chains.run``."""
        found, expected = RUN(chains), copy.copy(chains).run_in_python()
        if isinstance(expected, Shortage):
            assert found == expected
            self.shortages += 1
        else:
            assert isinstance(found, np.ndarray)
            assert np.array_equal(found, expected)
            self.plans += 1
        return found

    def hand_over(
        self, tables: LayerTables, owner: NDArray[np.int32], before: IntTable, owned: IntTable
    ) -> NDArray[np.int32]:
        """Stands in for ``hand_over``."""
        found = assign_chains.hand_over(tables, owner, before, owned)
        assert np.array_equal(found, assign_chains.hand_over_in_python(tables, owner, before, owned))
        self.handed_over += not np.array_equal(found, owner)
        return found


RUN = Chains.run


@pytest.fixture(scope="module")
def compared() -> Iterator[Compared]:
    assert COMPILED is not None, "kernels/chains.cpp was not built: pip install -e . needs a C++ compiler"
    seen = Compared()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Chains, "run", lambda chains: seen.run(chains))
        patch.setattr("spare_megatron.protocol.assign.hand_over", seen.hand_over)
        yield seen


def play(seed: int, groups: int, steps: int) -> None:
    """A history of losses and returns, of speeds that change and shards that are adopted."""
    draw = random.Random(seed)
    redundancy = draw.randint(2, min(6, groups))
    placement = build_placement(groups, redundancy)
    granularity = draw.choice(("microbatch", "microbatch", "shard"))
    per_shard = draw.randint(1, 5)
    print(f"seed {seed}: r {redundancy}, {per_shard} pieces a shard, {granularity}")
    live, present, slow = set(range(groups)), None, dict[int, int]()
    for _ in range(steps):
        changed = draw.sample(range(groups), draw.randint(1, max(1, groups // 8)))
        wanted = live ^ set(changed) or live
        if draw.random() < 0.3:
            slow = {group: draw.randint(USUAL + 1, 3 * USUAL) for group in draw.sample(range(groups), groups // 4)}
        if granularity == "microbatch" and draw.random() < 0.3:
            shard = draw.randrange(groups)
            others = [group for group in range(groups) if group not in placement.hosts_of(shard)]
            placement = placement.adopting([(shard, draw.choice(others))] if others else [])
        found = assign(placement, sorted(wanted), per_shard, granularity, present, slow)
        if isinstance(found, WipeOut):
            placement = placement.adopting([])
            continue
        assert isinstance(found, Assignment)
        live, present = wanted, found


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.integers(3, 24))
def test_small_jobs(compared: Compared, seed: int, groups: int) -> None:
    play(seed, groups, 8)


def test_jobs_of_hundreds_of_groups(compared: Compared) -> None:
    for seed in range(6):
        play(seed, 300, 30)
    print(f"{compared.plans} plans, {compared.shortages} times the caps were too small")
    assert min(compared.plans, compared.handed_over) > 100
    assert compared.shortages > 0


def test_another_version_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assign_native, "VERSION", assign_native.VERSION + 1)
    with pytest.raises(ConfigError, match=r"_chains\..* has version \d+, but this package needs .*pip install -e"):
        assign_native.compiled_chains.__wrapped__()


def test_without_a_library_or_with_a_damaged_one_python_makes_the_plans(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(assign_native, "__file__", str(tmp_path / "assign_native.py"))
    assert assign_native.compiled_chains.__wrapped__() is None
    (tmp_path / "_chains.so").write_bytes(b"no library")
    assert assign_native.compiled_chains.__wrapped__() is None
    placement = build_placement(7, 3)
    compiled = assign(placement, [0, 1, 3, 5, 6], 4, "microbatch", None)
    monkeypatch.setattr("spare_megatron.protocol.assign_chains.compiled_chains", lambda: None)
    written = assign(placement, [0, 1, 3, 5, 6], 4, "microbatch", None)
    assert isinstance(compiled, Assignment)
    assert isinstance(written, Assignment)
    assert np.array_equal(compiled.owner, written.owner)
    assert compiled.reason == written.reason
