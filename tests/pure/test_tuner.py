"""Choices of redundancy and save interval, memory, traces, failure domains, and what spare-plan says and refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from spare_megatron.cli import plan as cli
from spare_megatron.config.errors import ConfigError
from spare_megatron.placement import build_placement
from spare_megatron.placement.domains import parse_topology, spread_over_domains
from spare_megatron.planning import published
from spare_megatron.planning.at_start import Measured, at_start, updated_interval
from spare_megatron.planning.choose import TIE, choose, choose_granularity
from spare_megatron.planning.cluster_figures import ClusterFigures
from spare_megatron.planning.memory import Shape, fitting, memory, table
from spare_megatron.planning.ratio import slowest
from spare_megatron.planning.trace import parse_trace

CLUSTER = ClusterFigures(120_000, 600, 300, 3600, 60, 64, 2, weibull_shape=0.78)
FLAGS = ["--gpus", "120000", "--gpus-per-group", "600", "--restart-s", "3600", "--save-s", "60"]
FLAGS += ["--compute-s", "64", "--reduce-s", "2"]
JOB = Measured(8, 16, 120.0, 20.0, 10.0, 1.0, 16, 100_000, mtbf_gpu_hours=500.0)


def test_staged_takes_the_least_redundancy_of_equals() -> None:
    plan = choose(CLUSTER)
    ratios = {each.redundancy: each.outcome.ratio for each in plan.candidates if each.outcome}
    best = min(ratios.values())
    assert ratios[plan.chosen.redundancy] <= best * (1 + TIE)
    assert all(ratios[r] > best * (1 + TIE) for r in ratios if r < plan.chosen.redundancy)
    assert [each.redundancy for each in plan.candidates] == list(range(2, 21))
    assert f"redundancy {plan.chosen.redundancy} endures" in plan.reason


def test_staging_time_lowers_redundancy() -> None:
    free = choose(replace(CLUSTER, rejoin_s=600.0)).chosen.redundancy
    charged = choose(replace(CLUSTER, rejoin_s=600.0, data_gib=200_000.0)).chosen
    assert charged.redundancy < free
    assert charged.stage_gib_per_group == charged.redundancy * 1000


def test_shared_data_is_read_by_all_and_restarts_are_planned() -> None:
    chosen = choose(replace(CLUSTER, data="shared")).chosen
    assert (chosen.redundancy, chosen.endurable_failures) == (200, 199)
    assert chosen.outcome is not None
    assert 60 <= (chosen.outcome.restart_after or 0) <= 100
    assert chosen.mean_work_until_restart < chosen.mean_work


def test_a_planned_restart_is_counted_in_lost_groups_as_a_job_counts_it() -> None:
    """The first losses are replaced by standbys; a job and spare-simulate count groups that are lost."""
    few = ClusterFigures(
        gpus=64, gpus_per_group=1, mtbf_s=21600, restart_s=900, save_s=30, compute_s=20, reduce_s=2, adopt_s=300
    )
    free = replace(few, restart_s=0, save_s=0)  # restarts cost nothing, and yet there is none while no group is lost
    for cluster in (*(replace(few, standby_groups=count) for count in (1, 2, 3)), replace(free, standby_groups=3)):
        chosen = choose(cluster, 2).chosen
        assert chosen.outcome is not None
        assert chosen.outcome.restart_after == 1
        assert chosen.mean_work_until_restart == 1.0


def test_given_redundancy_is_honoured_or_refused() -> None:
    assert choose(CLUSTER, 5).chosen.redundancy == 5
    with pytest.raises(ConfigError, match=r"--redundancy 201 is not in 1\.\.200"):
        choose(CLUSTER, 201)


def test_impossible_cluster_says_what_is_needed() -> None:
    with pytest.raises(ConfigError, match=r"--mtbf-s 5 is too short: .* use --mtbf-s \d+"):
        choose(replace(CLUSTER, mtbf_s=5.0))


def test_checkpoint_only_lasts_up_to_its_first_loss() -> None:
    """mu(N, 1) = 1: no loss is endured, the first one is fatal and comes after m; docs/theory.md, section 5."""
    rare = ClusterFigures(1000, 100, 21600, 900, 30, 20, 2)
    alone = choose(rare, 1).chosen
    assert alone.endurable_failures == 0
    assert alone.outcome is not None
    # A job under the published availability with the same step: one restart per loss, the best interval, jitter.
    expected = 1 / published.best_availability(21600, 900, 30)
    assert alone.outcome.ratio == pytest.approx(expected * (20 * float(slowest(0.05, 10)) + 2) / 22, rel=0.01)
    with pytest.raises(ConfigError, match=r"endures 0\.0 losses and ends with the next, after 900 s"):
        choose(replace(rare, mtbf_s=900.0), 1)


def test_no_advice_where_no_rate_of_losses_is_found() -> None:
    with pytest.raises(ConfigError, match="; use shorter restarts and saves") as reported:
        choose(replace(CLUSTER, restart_s=1e18), 2)
    assert "or more" not in str(reported.value)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("mtbf_s", float("nan"), "--mtbf-s is nan, but must be a finite number"),
        ("compute_s", 0.0, "--compute-s is 0.0, but must be more than 0"),
        ("save_s", -1.0, "--save-s is -1.0, but must be at least 0"),
        ("gpus", 119_999, "is not divisible by --gpus-per-group 600; use --gpus 119400"),
        ("gpus", 600, "is one group, which can mask no loss; use at least 1200 GPUs"),
    ],
)
def test_bad_figures(field: str, value: float, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        replace(CLUSTER, **{field: value})  # type: ignore[arg-type]


def test_memory_table() -> None:
    """Bytes per parameter at D = 1: 2 + 4 + 4 + 12; exact 2 + 8 + 2 + 4 + 12; plain 2 + 4 + 12 / N."""
    one = memory(2**30, Shape(4, 1), "fp32")
    assert one.total == pytest.approx(22)
    assert memory(2**30, Shape(4, 1), "exact").total == pytest.approx(28)
    assert memory(2**30, Shape(4, 1), "bf16").total == pytest.approx(20)
    assert sum(one.plain.values()) == pytest.approx(9)


@pytest.mark.parametrize(("inner_data", "context"), [(2, 1), (1, 2)])
@pytest.mark.parametrize(
    ("mode", "group_sum", "total"), [("fp32", 2, 2 + 4 + 2 + 2 + 6), ("exact", 4, 2 + 10 + 4 + 2 + 6)]
)
def test_ranks_that_share_parameters_hold_them_whole_and_their_sum(
    inner_data: int, context: int, mode: str, group_sum: float, total: float
) -> None:
    """megatron_adapter/model/group_sum.py: a buffer as wide as the accumulator, of this rank's part."""
    found = memory(2**30, Shape(8, 2, inner_data, context), mode)
    assert found.parts["weights"] == pytest.approx(2)
    assert found.parts["group_sum"] == pytest.approx(group_sum)
    assert found.total == pytest.approx(total)
    assert sum(found.plain.values()) == pytest.approx(2 + 4 + 12 / 8)
    wide = memory(2**30, Shape(16, 4, 2, 2), mode)
    assert wide.parts["weights"] == pytest.approx(2)
    assert wide.parts["optimizer"] == pytest.approx(3)


def test_the_page_of_exact_sums_shows_the_table_of_the_planner() -> None:
    assert table() in (Path(__file__).parents[2] / "docs" / "exact_reduction.md").read_text()


def test_what_does_not_fit_names_the_d_that_would() -> None:
    with pytest.raises(ConfigError, match="use --inner-data-parallel 2 with --gpus-per-group 16") as reported:
        fitting(70e9, Shape(128, 8), "fp32", 160.0)
    assert "179.3 GiB per GPU" in str(reported.value)
    assert fitting(70e9, Shape(128, 16, 2), "fp32", 160.0).total < 160
    with pytest.raises(ConfigError, match="GPUs per replica"):
        fitting(70e9, Shape(128, 8), "fp32", 20.0)


def test_trace() -> None:
    rng = np.random.default_rng(11)
    gaps = 300 * rng.weibull(0.78, 4000)
    lines = ["time_s,node", *(f"{time_s},n{n}" for n, time_s in enumerate(np.cumsum(gaps)))]
    trace = parse_trace(lines, "t.csv")
    assert trace.mtbf_s == pytest.approx(gaps.mean())
    assert trace.weibull_shape() == pytest.approx(0.78, abs=0.05)
    late = parse_trace([f"{time_s + 40_000},n{n}" for n, time_s in enumerate(np.cumsum(gaps))], "t.csv")
    assert late.weibull_shape() == pytest.approx(parse_trace(lines, "t.csv").weibull_shape(), abs=0.01)
    for bad, words in (
        (["1,a", "x,b"], "t.csv line 2"),
        (["5,a", "4,b"], "t.csv line 2: time 4 is before 5"),
        (["1"], "t.csv line 1"),
        ([], "has no loss"),
    ):
        with pytest.raises(ConfigError, match=words):
            parse_trace(bad, "t.csv")


@pytest.mark.parametrize("losses", [2, 3, 40])
def test_absolute_times_are_refused(losses: int) -> None:
    lines = ["time_s,node", "", *(f"{1_700_000_000 + 21_600 * n},n{n}" for n in range(losses))]
    trace = parse_trace(lines, "t.csv")
    with pytest.raises(
        ConfigError, match=r"t\.csv line 3: .* 1\.7e\+09 s, but losses are 21600 s .*: subtract its start time"
    ):
        _ = trace.mtbf_s


@pytest.mark.parametrize("times_s", [[9e5], [5000, 5000], [5000, 5010], [21_600 * 30 + 21_600 * n for n in range(9)]])
def test_a_quiet_beginning_is_taken(times_s: list[float]) -> None:
    trace = parse_trace([f"{time_s},a" for time_s in times_s], "t.csv")
    assert trace.mtbf_s == times_s[-1] / len(times_s)


def test_hosts_lie_in_different_racks() -> None:
    placement = build_placement(200, 5)
    listed = parse_topology([f"{group},rack{group // 4}" for group in range(200)], "racks", 200)
    spread = spread_over_domains(placement, listed)
    assert spread.sharing_before > spread.sharing_after == 0
    assert spread.domains_endured_after > spread.domains_endured_before
    assert sorted(spread.numbers) == list(range(200))
    rack_of = {number: listed[line] for line, number in enumerate(spread.numbers)}
    for hosts in placement.hosts().tolist():
        assert len({rack_of[host] for host in hosts}) == 5
    for bad, words in ((["0,a", "0,b"], "line 2: group 0 is listed twice"), (["0,a"], "lacks 199 of 200")):
        with pytest.raises(ConfigError, match=words):
            parse_topology(bad, "racks", 200)


def test_at_start_and_update() -> None:
    choice = at_start(JOB)
    assert 2 <= choice.redundancy <= 8
    assert "500 GPU hours" in choice.reason
    assert dict(choice.rows())["redundancy"] == str(choice.redundancy)
    assert json.loads(json.dumps(choice.as_json()))["save_interval_steps"] == choice.save_interval_steps
    default = at_start(replace(JOB, mtbf_gpu_hours=None))
    assert default.mtbf_s == pytest.approx(49_152 * 3600 / 128)
    kept = at_start(replace(JOB, redundancy=2))
    assert kept.redundancy == 2
    more = updated_interval(replace(JOB, redundancy=2), kept, losses=60, elapsed_s=20 * 3600.0)
    assert more is not None
    assert kept.save_interval_steps / 4 - 1 <= more.save_interval_steps < kept.save_interval_steps
    assert "60 losses in 72000 s" in more.reason
    same = updated_interval(JOB, kept, losses=1, elapsed_s=kept.mtbf_s)
    assert same is None or same.save_interval_steps > 0


def test_a_job_may_have_more_standbys_than_groups() -> None:
    few, many = (at_start(replace(JOB, standby_groups=count)) for count in (JOB.num_groups, JOB.num_groups + 1))
    assert many == few
    assert many.time_to_train_ratio is not None


def test_one_group_only_chooses_the_interval() -> None:
    choice = at_start(replace(JOB, num_groups=1))
    assert choice.redundancy == 1
    assert "every loss" in choice.reason
    with pytest.raises(ConfigError, match="--spare-mtbf-gpu-hours is 0"):
        at_start(replace(JOB, mtbf_gpu_hours=0.0))


@pytest.mark.parametrize("shape", ["0.1", "20"])
@pytest.mark.parametrize("more", [[], ["--rejoin-s", "600"], ["--standby-groups", "200"]])
def test_the_ends_of_what_is_taken_give_a_plan(shape: str, more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*FLAGS, "--mtbf-s", "30000", "--weibull-shape", shape, *more, "--json"]) == 0
    assert 1 < json.loads(capsys.readouterr().out)["time_to_train_ratio"] < 3


def test_granularity_is_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    """Single pieces spread what was lost over all survivors; with one piece a shard there is nothing to spread."""
    ratios = {}
    for granularity in ("auto", "microbatch", "shard"):
        assert (
            cli.main([*FLAGS, "--mtbf-s", "300", "--standby-groups", "0", "--granularity", granularity, "--json"]) == 0
        )
        found = json.loads(capsys.readouterr().out)
        ratios[granularity] = found["time_to_train_ratio"]
        if granularity == "auto":
            assert found["granularity"] == "microbatch"
            reason = found["reason"]
    assert ratios["auto"] == ratios["microbatch"] < ratios["shard"]
    assert f"would take {ratios['shard'] / ratios['auto']:.3f} of that time" in reason


def test_a_job_that_only_single_pieces_keep_going_is_planned() -> None:
    """Steps of over an hour while groups are lost every three minutes: with whole shards none is ever done."""
    cluster = ClusterFigures(400, 8, mtbf_s=174, restart_s=38, save_s=2, compute_s=4755, reduce_s=945)
    with pytest.raises(ConfigError):
        choose(replace(cluster, granularity="shard"))
    plan, other = choose_granularity(cluster)
    assert plan.chosen.granularity == "microbatch"
    assert "would make no progress" in other


def test_spare_plan_json_table_and_plot(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    topology = tmp_path / "racks.csv"
    topology.write_text("\n".join(f"{group},r{group // 8}" for group in range(200)))
    more = ["--mtbf-s", "300", "--params", "1e12", "--gpu-memory-gib", "80", "--redundancy", "7"]
    picture = tmp_path / "plan.png"
    assert cli.main([*FLAGS, *more, "--topology", str(topology), "--plot", str(picture), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    keys = {
        "redundancy",
        "granularity",
        "save_interval_s",
        "save_interval_steps",
        "time_to_train_ratio",
        "availability",
    }
    keys |= {"mean_work", "endurable_failures", "restart_after_failures", "inner_data_parallel", "memory_gib_per_gpu"}
    assert keys <= set(found)
    assert all(keys <= set(each) for each in found["candidates"])
    assert found["redundancy"] == 7
    assert found["topology"]["sharing_after"] < found["topology"]["sharing_before"]
    assert picture.stat().st_size > 1000
    assert cli.main([*FLAGS, *more, "--topology", str(topology)]) == 0
    reported = capsys.readouterr().out
    assert "* 7" in reported
    numbers = reported.partition("numbers for groups 0..199 of the topology: ")[2].partition("\nhost pairs")[0]
    assert [int(each) for each in numbers.replace("\n", " ").split(", ")] == found["topology"]["group_numbers"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--mtbf-s", "5"], "--mtbf-s 5 is too short"),
        (["--mtbf-s", "inf"], "--mtbf-s is inf, but must be a finite number"),
        (["--mtbf-s", "300", "--redundancy", "300"], "--redundancy 300 is not in 1..200"),
        (["--trace", "nowhere.csv"], "--trace nowhere.csv cannot be read"),
        (["--mtbf-s", "300", "--gpu-memory-gib", "80"], "without --params"),
        (
            ["--mtbf-s", "300", "--inner-data-parallel", "7"],
            "--gpus-per-group 600 is not divisible by --inner-data-parallel 7; use a divisor of it, such as 6",
        ),
        (
            ["--mtbf-s", "300", "--inner-data-parallel", "8", "--context-parallel-size", "2"],
            "is not divisible by --inner-data-parallel 8 times --context-parallel-size 2",
        ),
        (["--mtbf-s", "300", "--context-parallel-size", "0"], "--context-parallel-size is 0"),
        (["--mtbf-s", "300", "--weibull-shape", "0.005"], "--weibull-shape is 0.005, but must be 0.1 to 20"),
        (["--mtbf-s", "300", "--weibull-shape", "2000"], "--weibull-shape is 2000, but must be 0.1 to 20"),
        (["--mtbf-s", "300", "--weibull-shape", "0"], "--weibull-shape is 0.0, but must be more than 0"),
        (["--mtbf-s", "300", "--standby-groups", "201"], "--standby-groups 201 are more than the 200 groups"),
        (["--mtbf-s", "300", "--state-gib", "40"], "--state-gib has no effect without --rejoin-s S; give both"),
        (
            ["--mtbf-s", "300", "--rejoin-s", "600", "--state-gib", "900", "--transfer-gib-per-s", "0.1"],
            "so a lost group would never catch up; use a higher --transfer-gib-per-s, or leave --rejoin-s out",
        ),
        (
            ["--mtbf-s", "300", "--data", "shared", "--data-gib", "100"],
            "--data-gib 100 says what is staged, but with --data shared nothing is",
        ),
    ],
)
def test_spare_plan_refuses_with_exit_2(more: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*FLAGS, *more]) == 2
    reported = capsys.readouterr().err
    assert words in reported
    assert reported.count("\n") == 1
