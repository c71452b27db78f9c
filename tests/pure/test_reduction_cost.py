"""The roofline of exact sums: traffic counted operation by operation, times, and the tables of the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from spare_megatron.planning import reduction_cost as cost
from tests.pure import cost_tables

PAGE = Path(__file__).parents[2] / "docs" / "exact_reduction.md"


def _counted(a: int, microbatches: int, g: int) -> float:
    """Bytes of the kernels of a piece, per microbatch, one after the other; of a = 8 and C = 1, of two pieces."""
    if microbatches == 1 and a == 4:
        return g + a + a
    if microbatches == 1:
        return (g + g + a + a) / 2
    moved, waits = 0, g
    for _ in range(1, microbatches - 1):
        if waits == 2:
            moved += 2 + 4
        waits = 4
        moved += g + 4 + 4
    return (moved + g + waits + a + a) / microbatches


@pytest.mark.parametrize("g", [2, 4])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 8])
@pytest.mark.parametrize(("mode", "a"), [("exact", 8), ("exact32", 4)])
def test_separate_kernels_move_what_each_of_them_moves(mode: str, a: int, microbatches: int, g: int) -> None:
    moved = cost.traffic(mode, microbatches, g, "separate")
    assert moved.gemm == g
    assert moved.kernels == pytest.approx(_counted(a, microbatches, g))
    assert cost.traffic("fp32", microbatches, g, "separate").kernels == g + 4 + 4


@pytest.mark.parametrize(("mode", "a"), [("exact", 8), ("exact32", 4)])
def test_fused_gemms_leave_one_sweep_a_piece_and_an_epilogue_none(mode: str, a: int) -> None:
    for c in (1, 2, 8):
        assert cost.traffic(mode, c, 2, "fused") == cost.MovedBytes(8, (4 + a + a + 4) / c)
        # The first GEMM of a piece writes 4, those between read and write 4, the last adds its 4 read ones to a.
        gemms = a + a if c == 1 else 4 + 8 * (c - 2) + 4 + a + a
        assert cost.traffic(mode, c, 2, "epilogue") == cost.MovedBytes(gemms / c, 0)
    assert cost.traffic("plain", 1, 2, "fused") == cost.MovedBytes(8, 0)


def test_the_issue_s_figures() -> None:
    """4 + 16 bytes are 6 ps on an H100, beside 35 ps of 4096 tokens at 70% of its speed: one sixth. Two gradients in a
    pass over the sums take three fifths of that, as fp32 sums do."""
    gpu = cost.GPUS["h100"]
    assert cost.kernels_s(gpu, cost.MovedBytes(4, 4 + 16)) == pytest.approx(6e-12, rel=0.01)
    assert cost.traffic("exact", 1, 4, "separate") == cost.traffic("fp32", 1, 4, "separate") == cost.MovedBytes(4, 12)
    assert cost.compute_s(gpu, 4096, 0.7) == pytest.approx(35.5e-12, rel=0.01)
    assert (
        cost_tables.wire_s(8, 1000)
        == pytest.approx(2 * cost_tables.wire_s(4, 1000))
        == pytest.approx(320e-12, rel=0.01)
    )


def test_the_share_falls_with_tokens_and_with_c() -> None:
    shares = [cost.exact_share("cpu", "exact", c) for c in (1, 2, 4, 8)]
    assert shares[0] > 0
    assert shares == pytest.approx([shares[0] / c for c in (1, 2, 4, 8)])
    assert cost.exact_share("cpu", "exact", 2, 8192) == pytest.approx(shares[1] / 2)
    for device in cost.GPUS:
        assert [cost.exact_share(device, "exact", c) for c in (1, 2)] == [0, 0], "a gradient that waits costs nothing"
        assert 0 < cost.exact_share(device, "exact", 8) < cost.exact_share(device, "exact", 4)
        fused = [cost.exact_share(device, "exact", c, way="fused") for c in (1, 2, 4, 8)]
        assert fused == sorted(fused, reverse=True)
        assert cost.exact_share(device, "exact", 4, 8192, "fused") == pytest.approx(fused[2] / 2)
        assert cost.exact_share(device, "fp32", 1) == 0


def test_few_tokens_cost_no_more_on_a_cpu_than_was_measured() -> None:
    assert cost.exact_share("cpu", "exact", 1, 16) == cost.CPU_SHARES["exact"]
    assert cost.exact_share("cpu", "exact", 1, 512) == cost.CPU_SHARES["exact"] / 2


def test_a_job_s_device_and_its_shard() -> None:
    names = (None, "NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA B200", "NVIDIA A100-SXM4-80GB")
    assert [cost.device_of(name) for name in names] == ["cpu", "h100", "h200", "b200", "h100"]
    assert cost.shard_s("cpu", 1e18, 8, 8) is None
    # 64 GPUs at 40% of 989.5 TFLOP/s.
    assert cost.shard_s("h100", 1e18, 8, 8) == pytest.approx(1e18 / (64 * 989.5e12 * 0.4))


def test_the_page_has_the_tables() -> None:
    text = PAGE.read_text()
    for table in (cost_tables.traffic_table(), cost_tables.step_table()):
        assert table in text, f"docs/exact_reduction.md lacks:\n{table}"
    section = text.partition("## A roofline for GPUs")[2].partition("\n## ")[0]
    hidden = [f"{cost_tables.hidden_tokens(gpu, 16):,.0f} ({gpu.name})" for gpu in cost.GPUS.values()]
    computing = [f"{cost.compute_s(gpu) * 1e12:.1f} ps ({gpu.name})" for gpu in cost.GPUS.values()]
    wires = [f"{cost_tables.wire_s(width, 1000) * 1e12:.0f} ps with {width}" for width in (8, 6, 4)]
    step = [f"64 microbatches, which compute for {64e12 * cost.compute_s(cost.GPUS['h100']):,.0f} ps"]
    missing = [words for words in (*hidden, *computing, *wires, *step) if words not in section]
    assert not missing, f"docs/exact_reduction.md, A roofline for GPUs, lacks: {missing}"
