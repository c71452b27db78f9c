"""docs/gpu_costs.md has the tables that the script prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import gpu_costs

PAGE = Path(__file__).resolve().parents[2] / "docs" / "gpu_costs.md"


@pytest.mark.parametrize("table", gpu_costs.TABLES, ids=lambda table: table.__name__)
def test_a_table_of_the_page_is_the_scripts(table: gpu_costs.Callable[[], str]) -> None:
    assert table() in PAGE.read_text()


def test_several_buckets_in_flight_come_near_the_bytes() -> None:
    model = gpu_costs.MODELS[0]
    assert gpu_costs.exchange_s(model, gpu_costs.BUCKETS[0], 1) > 2.5 * gpu_costs.ideal_s(model)
    assert gpu_costs.exchange_s(model, gpu_costs.BUCKETS[1], 3) < 1.15 * gpu_costs.ideal_s(model)
