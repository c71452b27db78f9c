"""What is lost while nodes are repaired, simulated with the places of groups as the launcher gives them."""

from __future__ import annotations

import json
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO

import pytest

from spare_megatron.cli import plan, simulate
from spare_megatron.config.errors import ConfigError
from spare_megatron.simulator.node_losses import (
    CheckpointRestarts,
    NodeFigures,
    lost_share,
    mean_lost_share,
    mean_restarted_lost_share,
)

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


def salvaged_share(figures: NodeFigures, spares: int) -> float:
    """The share that is lost where groups restart at once, in closed form. A node breaks at the same rate wherever it
    trains, and repairs are independent, so the chance of k broken ones is proportional to the product of
    rate(i) repair / (i + 1) over i < k, for repairs of any distribution (docs/theory.md, section 10)."""
    size, total = figures.nodes_per_group, figures.groups * figures.nodes_per_group + spares
    train = [min(figures.groups, (total - broken) // size) for broken in range(total + 1)]
    weights = [1.0]
    for broken in range(total):
        rate = train[broken] * size * figures.taken_out / figures.mtbf_h
        weights.append(weights[-1] * rate * figures.repair_h / (broken + 1))
    live = sum(weight * one for weight, one in zip(weights, train, strict=True)) / sum(weights)
    return 1 - live / figures.groups


@pytest.mark.parametrize(("groups", "size", "spares"), [(4, 64, 1), (8, 8, 0), (3, 2, 0)])
def test_with_salvage_the_share_is_that_of_the_closed_formula(groups: int, size: int, spares: int) -> None:
    figures = NodeFigures(groups, size, 30.0 * groups * size, restart_h=0.0)
    found = sum(lost_share(figures, spares, True, seed, days=500) for seed in range(6)) / 6
    assert found == pytest.approx(salvaged_share(figures, spares), rel=0.1)


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_a_group_with_fewer_stages_loses_the_share_of_those_that_it_lacks(stages: int) -> None:
    """Losses so rare that no two come together: rate x nodes of a group x repair, times 1 - stages / 4."""
    figures = NodeFigures(2, 4, 20_000.0, taken_out=1.0, restart_h=0.0, stages=4, shapes=(stages,))
    found = sum(lost_share(figures, 0, True, seed, days=20_000) for seed in range(6)) / 6
    assert found == pytest.approx(4 / 20_000 * 24 * (1 - stages / 4), rel=0.1)


def test_groups_with_fewer_stages_lose_less_than_salvage_alone_and_finer_shapes_less_still() -> None:
    """Nodes break so often that several groups miss some at a time: what they do not use completes others."""
    figures = NodeFigures(8, 8, 400.0, taken_out=1.0, stages=8)
    waits, halves, all_shapes = (
        mean_lost_share(replace(figures, shapes=shapes), 0, True, 8) for shapes in ((), (4, 2, 1), range(7, 0, -1))
    )
    assert all_shapes < 0.8 * halves < 0.8 * 0.9 * waits


def test_a_job_that_restarts_from_checkpoints_pays_for_each_interruption() -> None:
    """Nodes are replaced: a restart, and half an interval of steps that are run again, once in the job's MTBF; and the
    saves."""
    figures = NodeFigures(4, 8, 640.0, taken_out=0.0)
    costs = CheckpointRestarts.at_best(figures, restart_h=0.5, save_h=0.02)
    assert costs.interval_h == pytest.approx((2 * 0.02 * 20) ** 0.5)
    found = mean_restarted_lost_share(figures, 0, costs, 10)
    up_h = 20.0
    trained = (up_h - costs.interval_h / 2) / (1 + 0.02 / costs.interval_h)
    assert found == pytest.approx(1 - trained / (up_h + 0.5), rel=0.05)
    broken = replace(figures, taken_out=1.0)
    assert mean_restarted_lost_share(broken, 0, costs, 10) > found + 0.8 * salvaged_share(broken, 0)


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
    assert rows[8]["lost"] < 0.002 < rows[0]["lost_by_restarts"]
    assert "lost_with_shapes" not in rows[0]
    assert found["spare_nodes_advised"] == 0, "one node is an eighth of the job"
    shapes = ["--gpus-per-node", "8", "--pipeline-model-parallel-size", "4", "--standby-price", "0"]
    assert plan.main([*words, *shapes]) == 0
    out = capsys.readouterr().out
    assert "salvage, smaller shapes" in out
    assert "times as much for the same training" in out
    # 1e9 parameters on 16 GPUs are 1.3 GiB each with fp32 sums; with half the stages twice as much
    sizes = ["--params", "1e9", "--gpu-memory-gib", "3", "--json"]
    assert plan.main([*words, *shapes, *sizes]) == 0
    assert json.loads(capsys.readouterr().out)["shapes"] == [3, 2]
    assert plan.main([*words, "--node-repair-h", "5"]) == 2
    assert "--node-repair-h 5 has no effect without --gpus-per-node" in capsys.readouterr().err
    assert plan.main([*words, "--gpus-per-node", "7"]) == 2
    assert "is no multiple of --gpus-per-node 7" in capsys.readouterr().err


def away(*words: str) -> float:
    """Mean share of the groups that spare-simulate finds away, of 8 groups of 8 nodes that break once in 64 hours."""
    common = ["--num-groups", "8", "--nodes-per-group", "8", "--mtbf-s", "3600", "--weibull-shape", "1"]
    common += ["--rejoin-s", "300", "--steps", "1200", "--compute-s", "600", "--reduce-s", "0", "--jitter", "0"]
    with redirect_stdout(StringIO()) as out:
        assert simulate.main([*common, "--redundancy", "8", "--pieces-per-shard", "8", *words, "--json"]) == 0
    return float(json.loads(out.getvalue())["groups_away"])


def test_the_controller_loses_as_much_of_the_groups_time_as_the_plan_says() -> None:
    """Steps of ten minutes with the real controller. A group that a failure strikes there is a random one of all, so
    fewer live ones have fewer losses, as in the plan."""
    figures = NodeFigures(8, 8, 64.0, repair_h=2.0)
    for salvage in (True, False):
        planned = mean_lost_share(figures, 0, salvage, 6, days=200 / 24)
        found = away("--node-repair-h", "2", "--trials", "3", *([] if salvage else ["--no-salvage"]))
        assert found == pytest.approx(planned, rel=0.15)
    assert away("--node-repair-h", "2", "--spare-nodes", "8", "--trials", "1") < 0.5 * planned


def test_the_controller_trains_with_smaller_shapes_as_the_plan_says() -> None:
    """Groups leave with a commit for their home shape; every invariant of the protocol machine is tested."""
    figures = NodeFigures(8, 8, 64.0, repair_h=2.0, stages=8, shapes=(4, 2, 1))
    planned = mean_lost_share(figures, 0, True, 6, days=200 / 24)
    words = ("--node-repair-h", "2", "--trials", "1", "--balance", "--check", "--pipeline-model-parallel-size", "8")
    words += ("--spare-shapes", "4,2,1")
    found = away(*words)
    assert found == pytest.approx(planned, rel=0.15)
    assert found < 0.8 * mean_lost_share(figures.at_home(), 0, True, 6, days=200 / 24)


def test_any_number_of_stages_loses_less_and_whole_layers_more() -> None:
    divided = NodeFigures(4, 16, 4_000.0, stages=16, shapes=(8, 4, 2, 1))
    finer = replace(divided, shapes=tuple(range(15, 0, -1)))
    layers = replace(finer, layers=96)
    assert layers.speed_with(16) == 1
    assert layers.speed_with(15) == layers.speed_with(14) == pytest.approx(6 / 7), "one stage has seven layers"
    lost = [mean_lost_share(one, 0, True, 10) for one in (finer, layers, divided)]
    assert lost[0] < lost[1] < 0.7 * lost[2]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--spare-nodes 2", "--spare-nodes 2 has no effect without --nodes-per-group G"),
        ("--spare-shapes 2", "has no effect without --pipeline-model-parallel-size PP; give both"),
        ("--pipeline-model-parallel-size 4", "size 4 has no effect without --nodes-per-group G; give both"),
        (
            "--pipeline-model-parallel-size 4 --nodes-per-group 2 --rejoin-s 9 --spare-shapes 4",
            "--spare-shapes 4 has 4 pipeline stages",
        ),
        (
            "--pipeline-model-parallel-size 4 --nodes-per-group 2 --rejoin-s 9 --num-layers 3",
            "--num-layers 3 is less than --pipeline-model-parallel-size 4",
        ),
        ("--num-layers 8", "--num-layers 8 has no effect without --pipeline-model-parallel-size PP"),
        ("--pipeline-model-parallel-size 0 --nodes-per-group 2 --rejoin-s 9", "is 0, but must be at least 1"),
        ("--no-salvage", "--no-salvage has no effect without --nodes-per-group G"),
        ("--nodes-per-group 0", "--nodes-per-group is 0, but must be at least 1"),
        ("--nodes-per-group 2", "has no effect without --rejoin-s S"),
        ("--nodes-per-group 2 --rejoin-s 9 --standby-groups 1", "do not go together"),
        ("--nodes-per-group 2 --rejoin-s 9 --node-share 2", "must be a share from 0 to 1"),
        ("--nodes-per-group 2 --rejoin-s 9 --node-repair-h 0", "--node-repair-h is 0, but must be above 0"),
        ("--nodes-per-group 2 --rejoin-s 9 --policy replication", "--nodes-per-group is only for --policy microbatch"),
    ],
)
def test_nodes_that_cannot_be_simulated(words: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main(["--num-groups", "4", *words.split()]) == 2
    assert sentence in capsys.readouterr().err


def test_impossible_figures() -> None:
    with pytest.raises(ConfigError, match="repair_h is 0"):
        NodeFigures(2, 2, 100.0, repair_h=0)
    with pytest.raises(ConfigError, match=r"take a node out is 1.5"):
        NodeFigures(2, 2, 100.0, taken_out=1.5)
