"""What is lost while nodes are repaired, simulated with the places of groups as the launcher gives them."""

from __future__ import annotations

import json

import pytest

from spare_megatron.cli import plan
from spare_megatron.config.errors import ConfigError
from spare_megatron.sim.node_losses import NodeFigures, lost_share, mean_lost_share

LLAMA3 = 50_675 / 8
"""Hours between two interruptions of a node of 8 GPUs."""


def test_without_spares_a_group_is_away_for_its_share_of_repairs() -> None:
    """One group: it trains for 1 / rate on average and is then away for a repair, so renewals give the share."""
    figures = NodeFigures(1, 16, LLAMA3, restart_h=0.0)
    away_h, trains_h = 24.0, LLAMA3 / 16 / 0.7
    share = sum(lost_share(figures, 0, True, seed, days=1000) for seed in range(60)) / 60
    assert share == pytest.approx(away_h / (away_h + trains_h), rel=0.08)


def test_salvage_leaves_one_group_away_where_each_has_lost_a_node() -> None:
    """Four groups of many nodes that break often, with long repairs: without salvage most of them wait."""
    figures = NodeFigures(4, 16, 2000.0, repair_h=200.0, taken_out=1.0, restart_h=0.0)
    without = mean_lost_share(figures, 0, False, 6)
    with_it = mean_lost_share(figures, 0, True, 6)
    assert with_it < 0.6 * without
    assert mean_lost_share(figures, 8, True, 6) < 0.7 * with_it


def test_interruptions_that_leave_the_node_cost_a_restart_each() -> None:
    figures = NodeFigures(4, 2, 100.0, taken_out=0.0, restart_h=1.0)
    assert mean_lost_share(figures, 0, True, 8) == pytest.approx(1 / (1 + 100 / 2), rel=0.15)


def test_spare_plan_says_what_spare_nodes_are_worth(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--gpus", "64", "--gpus-per-group", "16", "--restart-s", "600", "--save-s", "10", "--compute-s", "10"]
    words += ["--reduce-s", "1", "--standby-groups", "0", "--steps", "1000", "--redundancy", "2"]
    assert plan.main([*words, "--gpus-per-node", "8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["mtbf_s"] == pytest.approx(3600 * 49152 / 64), "Llama 3's rate is the default"
    rows = found["spare_nodes"]
    assert [row["spare_nodes"] for row in rows] == list(range(9))
    assert rows[0]["lost"] <= rows[0]["lost_without_salvage"] < 0.05
    assert rows[8]["lost"] < 0.002
    assert plan.main([*words, "--node-repair-h", "5"]) == 2
    assert "--node-repair-h 5 has no effect without --gpus-per-node" in capsys.readouterr().err
    assert plan.main([*words, "--gpus-per-node", "7"]) == 2
    assert "is no multiple of --gpus-per-node 7" in capsys.readouterr().err


def test_impossible_figures() -> None:
    with pytest.raises(ConfigError, match="repair_h is 0"):
        NodeFigures(2, 2, 100.0, repair_h=0)
    with pytest.raises(ConfigError, match=r"take a node out is 1.5"):
        NodeFigures(2, 2, 100.0, taken_out=1.5)
