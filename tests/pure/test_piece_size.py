"""How many microbatches make a piece: what fits, the default's promise, the choice, and the commands' flags."""

from __future__ import annotations

import json
from math import ceil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spare_megatron.cli import plan, simulate
from spare_megatron.config.errors import ConfigError
from spare_megatron.config.piece_sizes import check, sizes_that_fit
from spare_megatron.planning.choose import expected_load
from spare_megatron.planning.cluster_figures import ClusterFigures
from spare_megatron.planning.memory import Shape, fitting, memory
from spare_megatron.planning.piece_size import TIE, for_job, step_time, with_figures, without_figures
from spare_megatron.planning.time_shares import time_shares
from spare_megatron.planning.uneven import heavy_groups, slowest_of_both

CLUSTER = ClusterFigures(1600, 8, 300, 3600, 60, 64, 2, rejoin_s=600.0)
PLAN = ["--gpus", "1600", "--gpus-per-group", "8", "--mtbf-s", "300", "--restart-s", "3600", "--save-s", "60"]
PLAN += [
    "--compute-s",
    "64",
    "--reduce-s",
    "2",
    "--rejoin-s",
    "600",
    "--redundancy",
    "7",
    "--standby-groups",
    "0",
    "--json",
]
SIMULATE = ["--num-groups", "12", "--redundancy", "3", "--steps", "20", "--jitter", "0", "--mtbf-s", "1e9"]
SIMULATE += ["--save-interval-s", "1e9", "--trials", "1", "--json"]


@given(st.lists(st.integers(1, 96), min_size=1, max_size=3), st.integers(-2, 200))
def test_what_fits_divides_every_shard_and_all_else_is_refused(shards: list[int], size: int) -> None:
    fit = sizes_that_fit(shards)
    assert fit == tuple(c for c in range(1, max(shards) + 1) if all(shard % c == 0 for shard in shards))
    if size in fit:
        check(size, shards)
        return
    with pytest.raises(ConfigError) as reported:
        check(size, shards)
    near = str(reported.value).partition("use ")[2].partition(" (")[0]
    assert [int(word) for word in near.split(" or ")] == [
        *[c for c in fit if c < size][-1:],
        *[c for c in fit if c > size][:1],
    ]


@pytest.mark.parametrize(
    ("size", "shards", "words"),
    [
        (
            3,
            [8],
            "--spare-piece-microbatches 3 does not divide the 8 microbatches of a shard; use 2 or 4 (all that fit:",
        ),
        (16, [8], "16 is larger than a shard of 8 microbatches; use 8 (all that fit: 1, 2, 4, 8)"),
        (4, [6, 12], "4 does not divide the 6 and 12 microbatches of a shard; use 3 or 6 (all that fit: 1, 2, 3, 6)"),
        (0, [8], "0 must be at least 1; use 1"),
        (2, [7], "2 does not divide the 7 microbatches of a shard; use 1 or 7"),
    ],
)
def test_a_size_that_does_not_fit_is_reported_in_a_sentence(size: int, shards: list[int], words: str) -> None:
    with pytest.raises(ConfigError) as reported:
        check(size, shards)
    assert words in str(reported.value)
    assert "\n" not in str(reported.value)


@given(st.integers(1, 96), st.floats(0, 0.5), st.integers(2, 60), st.data())
def test_the_default_costs_no_step_more_than_it_saves(
    microbatches: int, share: float, groups: int, data: st.DataObject
) -> None:
    """Whatever is lost: the mean load of the survivors, and what any smaller set of them must compute."""
    chosen = without_figures([microbatches], lambda c: share / c)
    c = chosen.microbatches
    assert microbatches % c == 0
    assert chosen.pieces_per_shard == microbatches // c
    shards = data.draw(st.integers(1, groups))
    hosts = data.draw(st.integers(1, shards))
    step = {size: ceil(microbatches // size * shards / hosts) * size * (1 + share / size) for size in (1, c)}
    assert step[c] <= step[1] * (1 + 1e-9)


@given(st.integers(1, 96), st.floats(0, 0.5), st.booleans())
def test_the_default_is_the_least_of_its_own_times(microbatches: int, share: float, moves: bool) -> None:
    chosen = without_figures([microbatches], lambda c: share / c, moves)
    times = {
        c: (1 + (c - 1) / microbatches * moves) * (1 + share / c)
        for c in range(1, microbatches + 1)
        if microbatches % c == 0
    }
    assert chosen.times == pytest.approx(times)
    assert chosen.microbatches == min(c for c in times if times[c] <= min(times.values()) * (1 + TIE))


def test_the_default_says_what_it_weighs() -> None:
    two = without_figures([64], lambda c: 0.116 / c)
    assert two.microbatches == 2
    assert "rounding takes 5.8% of computing instead of 11.6%" in two.reason
    assert "at most 1.6% of a shard more, which takes less than is saved" in two.reason
    one = without_figures([8], lambda c: 0.065 / c)
    assert one.microbatches == 1
    assert "2 would save 3.2%, and could cost 12.5% of a shard" in one.reason
    assert without_figures([8], lambda c: 0.0).microbatches == 1


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from([(4, 2), (13, 3), (200, 7)]),
    st.sampled_from([1, 6, 16, 64]),
    st.floats(0, 0.3),
    st.floats(100, 1e7),
    st.sampled_from([None, 600.0]),
    st.sampled_from([None, 1, 3]),
)
def test_the_choice_is_the_least_of_a_plain_loop(
    groups: tuple[int, int], microbatches: int, share: float, mtbf_s: float, rejoin_s: float | None, after: int | None
) -> None:
    number, redundancy = groups
    cluster = ClusterFigures(number, 1, mtbf_s, 600, 30, 20, 2, rejoin_s=rejoin_s, jitter=0.0, steps=1000)
    after = after if rejoin_s is None else None
    chosen = with_figures(cluster, redundancy, [microbatches], lambda c: share / c, after)
    times = {}
    for c in (c for c in range(1, microbatches + 1) if microbatches % c == 0):
        job_attempts, loads = expected_load(number, redundancy, microbatches // c)
        weights = time_shares(
            number, job_attempts.survival, mtbf_s, 1000 * 22.0, rejoin_s=rejoin_s, standby_groups=0, restart_after=after
        )
        mean = 0.0
        for k, weight in enumerate(weights):
            work = loads.after[min(k, len(loads.after) - 1)]
            compute_s = work * 20 * (1 + share / c)
            # A loss adds the largest part of a shard's pieces that one of r - 1 hosts takes to the mean load.
            patch = ceil(microbatches // c / max(1, redundancy - 1)) * c / microbatches
            patched_s = max(work, number / (number - k) + patch) * 20 * (1 + share / c)
            losses = (compute_s + 2) * (number - k) / (number * mtbf_s)
            mean += weight * (compute_s + 2 + losses * (patched_s - compute_s))
        times[c] = mean / 22
    assert chosen.times == pytest.approx(times, rel=1e-4)
    least = min(chosen.times.values())
    assert chosen.microbatches == min(c for c in times if chosen.times[c] <= least * (1 + TIE))
    assert f"pieces of {chosen.microbatches} of the {microbatches}" in chosen.reason


@pytest.mark.parametrize(("mtbf_s", "job_s"), [(50.0, 400.0), (300.0, 200.0), (10.0, 1e6)])
def test_shares_of_time_are_those_of_drawn_losses(mtbf_s: float, job_s: float) -> None:
    """Six groups, three losses are always endured and the fourth never: up to it, the time with k lost groups."""
    groups, survival = 6, np.array([1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0])
    drawn = np.sort(np.random.default_rng(5).exponential(groups * mtbf_s, (40_000, groups)), axis=1)
    bounds = np.minimum(np.concatenate([np.zeros((len(drawn), 1)), drawn], axis=1), job_s)
    spent = np.diff(bounds, axis=1).sum(axis=0) * survival[:groups]
    found = time_shares(groups, survival, mtbf_s, job_s)
    assert found == pytest.approx(spent / spent.sum(), abs=0.01)
    early = time_shares(groups, survival, mtbf_s, job_s, restart_after=2)
    assert early[:2] == pytest.approx(found[:2] / found[:2].sum())
    assert early[2:] == pytest.approx(0)
    spare = time_shares(groups, survival, mtbf_s, job_s, standby_groups=2)
    assert spare[0] >= found[0]
    assert spare.sum() == pytest.approx(1)


def test_groups_that_come_back_are_away_for_their_share() -> None:
    found = time_shares(4, np.ones(5), 100.0, 1e5, rejoin_s=400.0)
    away = 400 / (4 * 100 + 400)
    assert found == pytest.approx([0.5**4, 4 * 0.5**4, 6 * 0.5**4, 5 * 0.5**4])
    assert away == 0.5


@pytest.mark.parametrize(("loads", "counts"), [((1.25, 1.0), (2, 60)), ((1.0, 0.5), (7, 0)), ((2.0, 1.0), (3, 3))])
def test_the_slowest_of_both_kinds_is_that_of_drawn_times(loads: tuple[float, float], counts: tuple[int, int]) -> None:
    drawn = np.repeat(loads, counts) * np.random.default_rng(3).normal(1.0, 0.05, (20_000, sum(counts)))
    found = slowest_of_both(0.05, np.array([loads]).T, np.array([counts]).T)
    assert found == pytest.approx([drawn.max(axis=1).mean()], rel=2e-3)
    assert slowest_of_both(0.0, np.array([loads]).T, np.array([counts]).T) == [loads[0]]


@given(st.integers(2, 40), st.integers(1, 30), st.data())
def test_heavy_groups_and_the_others_have_all_pieces(groups: int, pieces: int, data: st.DataObject) -> None:
    lost = data.draw(st.integers(0, groups - 1))
    heavy = int(heavy_groups(groups, np.array([lost]), pieces)[0])
    most = ceil(groups * pieces / (groups - lost))
    assert 0 < heavy <= groups - lost
    assert heavy * most + (groups - lost - heavy) * (most - 1) == groups * pieces


def test_more_losses_make_pieces_smaller_and_more_cost_makes_them_larger() -> None:
    def size(cost: float, mtbf_s: float) -> int:
        cluster = ClusterFigures(64, 8, mtbf_s, 600, 30, 20, 2, steps=10_000)
        return with_figures(cluster, 2, [64], lambda c: cost / c).microbatches

    assert size(0.05, 1e9) > size(0.05, 1e5) >= size(0.05, 1e4) >= 1
    assert size(0.2, 1e5) >= size(0.05, 1e5) >= size(0.001, 1e5) == 1


def test_a_job_without_figures_takes_the_default_and_one_that_shares_no_pieces_the_cheapest() -> None:
    job = {"num_groups": 8, "group_size": 8, "shards": [64], "share": lambda c: 0.116 / c, "steps": 10_000}
    default = without_figures([64], lambda c: 0.116 / c)
    assert for_job(**job, redundancy=3) == default  # type: ignore[arg-type]
    rare = for_job(**job, redundancy=2, shard_s=30.0)  # type: ignore[arg-type]
    assert rare.microbatches > default.microbatches
    often = for_job(**job, redundancy=2, shard_s=30.0, mtbf_gpu_hours=10.0)  # type: ignore[arg-type]
    assert often.microbatches <= rare.microbatches
    assert often.times[8] > rare.times[8]
    for other in ({"redundancy": 1}, {"redundancy": 3, "granularity": "shard"}):
        assert for_job(**job, **other).microbatches == 64  # type: ignore[arg-type]


def test_gradients_that_wait_need_memory() -> None:
    shape = Shape(4, 1)
    for mode, one, more in (("exact", 10, 12), ("exact32", 4, 8), ("fp32", 4, 4), ("bf16", 4, 4)):
        found = [memory(2**30, shape, mode, piece_microbatches=c).parts["accumulator"] for c in (1, 2, 8)]
        assert found == pytest.approx([one, more, more])
    wide = memory(2**30, Shape(8, 2, 2), "exact", piece_microbatches=2).parts
    assert (wide["accumulator"], wide["group_sum"]) == (12, 4)
    with pytest.raises(ConfigError, match=r"use --piece-microbatches 1, which keeps no fp32 sum") as reported:
        fitting(2**30, shape, "exact", 28.0, piece_microbatches=2)
    assert "need 30.0 GiB" in str(reported.value)


def test_spare_plan_prints_the_choice(capsys: pytest.CaptureFixture[str]) -> None:
    def planned(*more: str) -> dict[str, object]:
        assert plan.main([*PLAN, *more]) == 0
        return dict(json.loads(capsys.readouterr().out))

    auto = planned("--reduce", "exact", "--microbatches-per-shard", "64", "--exact-cost", "0.116")
    assert (auto["piece_microbatches"], auto["pieces_per_shard"]) == (4, 16)
    assert "pieces of 4 of the 64 microbatches of a shard: rounding takes 2.9%" in str(auto["reason"])
    times = auto["piece_step_times"]
    assert isinstance(times, dict)
    assert times["2"] == pytest.approx(step_time(CLUSTER, 7, 32, 0.058), rel=1e-5)
    given_pieces = planned("--reduce", "exact", "--pieces-per-shard", "16")
    assert given_pieces["time_to_train_ratio"] == auto["time_to_train_ratio"]
    assert (given_pieces["piece_microbatches"], given_pieces["piece_step_times"]) == (1, None)
    eight = planned("--microbatches-per-shard", "64", "--piece-microbatches", "8")
    assert (eight["piece_microbatches"], eight["pieces_per_shard"]) == (8, 8)
    assert planned()["pieces_per_shard"] == 16
    # 8 GPUs hold weights, sums, what waits and optimizer of 28 bytes a parameter, but not 30.
    tight = ("--params", f"{8 * 2**30}", "--gpu-memory-gib", "29", "--microbatches-per-shard", "64")
    tight = ("--reduce", "exact", "--exact-cost", "0.116", *tight)
    few = planned(*tight)
    assert (few["piece_microbatches"], few["state_redundancy"]) == (4, 3)
    one = planned(*tight, "--state-redundancy", "200")
    assert one["piece_microbatches"] == 1
    assert "because the fp32 sums of pieces of 4 do not fit" in str(one["reason"])


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (
            ["--piece-microbatches", "3"],
            "--piece-microbatches 3 does not divide the 16 microbatches of a shard; use 2 or 4",
        ),
        (["--piece-microbatches", "32"], "32 is larger than a shard of 16 microbatches; use 16"),
        (["--pieces-per-shard", "8", "--piece-microbatches", "2"], "are both given; give --microbatches-per-shard M"),
        (["--pieces-per-shard", "0"], "--pieces-per-shard is 0, but must be at least 1"),
        (["--microbatches-per-shard", "0"], "--microbatches-per-shard is 0, but must be at least 1"),
    ],
)
def test_both_commands_refuse_pieces_that_do_not_fit(
    more: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for main, flags in ((plan.main, PLAN), (simulate.main, SIMULATE)):
        assert main([*flags, *more]) == 2
        reported = capsys.readouterr().err
        assert words in reported
        assert reported.count("\n") == 1


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--exact-cost", "0.1"], "--exact-cost 0.1 has no effect with --reduce fp32"),
        (["--reduce", "exact", "--pieces-per-shard", "8", "--device", "cpu"], "cpu has no effect where the pieces are"),
        (["--reduce", "exact", "--exact-cost", "inf"], "--exact-cost is inf, but must be a finite number"),
        (["--reduce", "exact", "--microbatch-tokens", "0"], "--microbatch-tokens is 0, but must be at least 1"),
    ],
)
def test_spare_plan_refuses_costs_that_cannot_be(
    more: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan.main([*PLAN, *more]) == 2
    assert words in capsys.readouterr().err


def test_a_size_is_a_number_or_auto(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        plan.main([*PLAN, "--piece-microbatches", "many"])
    assert "--piece-microbatches: 'many' is neither a number nor auto" in capsys.readouterr().err


def test_spare_simulate_computes_pieces_of_c(capsys: pytest.CaptureFixture[str]) -> None:
    """Without losses a step takes compute x (1 + S / C) + reduce."""
    for c, share in ((1, 0.08), (4, 0.02)):
        more = ["--microbatches-per-shard", "8", "--piece-microbatches", str(c), "--exact-cost", "0.08"]
        assert simulate.main([*SIMULATE, *more]) == 0
        ratio = json.loads(capsys.readouterr().out)["time_to_train_ratio"]["mean"]
        assert ratio == pytest.approx((64 * (1 + share) + 0.12) / 64.12)
    # One loss at the beginning: eleven survivors share eight pieces of one microbatch, or two of four.
    work = []
    for c in (1, 4):
        more = ["--microbatches-per-shard", "8", "--piece-microbatches", str(c), "--exact-cost", "0"]
        assert simulate.main([*SIMULATE, *more, "--inject", "sigkill:group=3,step=1,at=forward"]) == 0
        work.append(json.loads(capsys.readouterr().out)["mean_work"])
    assert work == pytest.approx([9 / 8, 12 / 8], rel=0.03)
    assert simulate.main([*SIMULATE, "--exact-cost", "0.1"]) == 2
    assert "--exact-cost 0.1 has no effect without --piece-microbatches C" in capsys.readouterr().err
    assert simulate.main([*SIMULATE, "--policy", "spare", "--piece-microbatches", "2"]) == 2
    assert "--piece-microbatches is only for --policy microbatch" in capsys.readouterr().err


def test_every_size_that_fits_is_found_and_a_huge_batch_takes_no_time() -> None:
    for common in [*range(1, 400), 65536, 99990]:
        assert sizes_that_fit([common]) == tuple(size for size in range(1, common + 1) if common % size == 0)
    assert sizes_that_fit([10**18])[:4] == (1, 2, 4, 5)
