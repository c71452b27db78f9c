"""The mean time until all copies of a state shard are lost: the formula, a simulation that draws single losses, and
others whose hosts are those of the protocol; and the number of copies that spare-plan chooses."""

from __future__ import annotations

import json
import random
from itertools import combinations
from math import inf
from typing import Any

import pytest

from spare_megatron.cli import plan, simulate
from spare_megatron.config.errors import ConfigError
from spare_megatron.planning.state_copies import host_sets, seconds_to_wipe_out
from spare_megatron.simulator.state_losses import simulated_wipe_out_s


def simulated_s(groups: int, copies: int, mtbf_s: float, copying_s: float, ends: int) -> float:
    """The mean time between wipe-outs. Each chain of losses begins with shards on sets of groups that are drawn, no
    two alike; a group that is lost is back when its shards have their copies again."""
    dice = random.Random(groups * 100 + copies)
    all_sets = [frozenset(one) for one in combinations(range(groups), copies)]
    total_s, wiped_out = 0.0, 0
    while wiped_out < ends:
        total_s += dice.expovariate(groups / mtbf_s)
        lost, hosts, over = [dice.randrange(groups)], list[frozenset[int]](), copies == 1
        while not over and (next_s := dice.expovariate((groups - len(lost)) / mtbf_s)) < copying_s:
            total_s += next_s
            lost.append(dice.choice([one for one in range(groups) if one not in lost]))
            hosts = hosts or dice.sample(all_sets, groups)
            over = any(map(set(lost).issuperset, hosts))
        total_s += 0.0 if over else copying_s
        wiped_out += over
    return total_s / wiped_out


@pytest.mark.parametrize(("groups", "copies", "copying"), [(5, 2, 0.02), (8, 2, 0.05), (8, 3, 0.1), (6, 1, 0.1)])
def test_the_formula_is_what_a_simulation_finds(groups: int, copies: int, copying: float) -> None:
    """``copying`` is a part of the time between losses of one group; 10000 wipe-outs have an error of 1 %."""
    found = simulated_s(groups, copies, 1.0, copying, ends=10_000)
    assert found == pytest.approx(seconds_to_wipe_out(groups, copies, 1.0, copying, sets=groups), rel=0.02)


def test_hosts_that_the_protocol_names_last_as_long() -> None:
    """1500 chains of losses have an error of 4 %; benchmarks/state_losses.py has more of them, and larger jobs."""
    found = simulated_wipe_out_s(5, 2, 1.0, 0.01, chains=1500, seed=0)
    assert found == pytest.approx(seconds_to_wipe_out(5, 2, 1.0, 0.01), rel=0.12)
    assert found > 1.05 * seconds_to_wipe_out(5, 2, 1.0, 0.01, sets=5), "some parts have the same hosts"


def test_different_sets_of_hosts() -> None:
    assert host_sets(4, 4) == 1
    assert host_sets(100, 2) == 100
    assert 4 < host_sets(5, 2) < 4.7
    assert 6.8 < host_sets(8, 2) < 7.3


def test_a_job_of_real_decisions_loses_last_copies(capsys: pytest.CaptureFixture[str]) -> None:
    """Steps of 100 s on 5 groups, of which one is lost every 2000 s, copies that take 1000 s: a loss is the end with a
    chance of 12 %. Every invariant of the protocol machine is tested; nothing is committed while copies are away."""
    words = "--num-groups 5 --state-redundancy 2 --rehost-s 1000 --mtbf-s 2000 --weibull-shape 1 --rejoin-s 10 "
    words += "--redundancy 5 --pieces-per-shard 2 --compute-s 100 --reduce-s 0 --jitter 0 --restart-s 1 --save-s 1 "
    words += "--save-interval-s 200 --steps 800 --trials 1 --check --json"
    assert simulate.main(words.split()) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["failures"] > 30
    assert 1 <= found["wipe_outs"] < 0.3 * found["failures"]
    lost_s = (found["time_to_train_ratio"]["mean"] - 1) * 800 * 100
    assert lost_s > 0.5 * 1000 * found["failures"]


PLAN = "--gpus 1024 --gpus-per-group 64 --restart-s 600 --save-s 2 --compute-s 60 --reduce-s 2 --redundancy 2 "
PLAN += "--standby-groups 0 --steps 1000 --params 100e9 --reduce exact32"


def state_plan(capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    assert plan.main([*PLAN.split(), *more, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_every_group_keeps_all_state_where_it_fits_and_as_few_as_are_safe_where_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    roomy, tight = state_plan(capsys), state_plan(capsys, "--gpu-memory-gib", "30")
    assert (roomy["state_redundancy"], tight["state_redundancy"]) == (16, 2)
    assert roomy["state_copies"] == tight["state_copies"]
    two, whole = tight["state_copies"][0], tight["state_copies"][-1]
    assert (whole["state_redundancy"], whole["wipe_out_days"], whole["lost"]) == (16, None, 0)
    gib = 100e9 / 64 / 2**30
    weights, state = 2 * gib, 12 * gib
    kept_less = state - 3 * state / 16  # two parts, and one that was taken over
    assert whole["memory_gib_per_gpu"] - two["memory_gib_per_gpu"] == pytest.approx(kept_less - weights, abs=0.01)
    assert two["copying_s"] == pytest.approx(5 + weights + state * 2 / 16, rel=1e-4)
    assert two["wipe_out_days"] == pytest.approx(
        seconds_to_wipe_out(16, 2, 16 * tight["mtbf_s"], two["copying_s"]) / 86_400, rel=1e-3
    )
    assert "with 2 copies of each part of the optimizer's state a GPU needs" in tight["reason"]
    slow = state_plan(capsys, "--gpu-memory-gib", "31", "--gather-gib-per-s", "0.0005", "--mtbf-s", "40000")
    assert slow["state_redundancy"] == 3, "copies are away for hours, so two are not safe"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--state-redundancy 17", "--state-redundancy 17 must lie in 1..16, as there are 16 groups"),
        ("--gather-gib-per-s 0", "--gather-gib-per-s is 0, but must be a finite number above 0"),
        ("--gpu-memory-gib 5", "more than --gpu-memory-gib 5"),
    ],
)
def test_impossible_copies(words: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main([*PLAN.split(), *words.split()]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--state-redundancy 4", "--state-redundancy 4 must lie in 1..3, as there are 4 groups"),
        ("--rehost-s 3", "--rehost-s 3 has no effect without --state-redundancy R; give both"),
        ("--state-redundancy 2 --standby-groups 1", "--standby-groups is not simulated with --state-redundancy 2"),
        ("--state-redundancy 2 --policy replication", "--state-redundancy is only for --policy microbatch"),
    ],
)
def test_copies_that_cannot_be_simulated(words: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main(["--num-groups", "4", *words.split()]) == 2
    assert sentence in capsys.readouterr().err


def test_one_copy_lasts_until_the_first_loss_and_no_copying_forever() -> None:
    assert seconds_to_wipe_out(8, 1, 800.0, 3.0) == 100.0
    assert seconds_to_wipe_out(8, 2, 800.0, 0.0) == inf


def test_rare_losses_have_the_textbook_rate() -> None:
    """Two losses of one of N pairs, the second within w: N * 2 * x * x * w."""
    assert 1 / seconds_to_wipe_out(10, 2, 1e6, 1.0, sets=10) == pytest.approx(10 * 2 * 1e-6**2, rel=1e-4)


def test_impossible_figures_are_refused() -> None:
    with pytest.raises(ConfigError, match="5 copies of each state shard do not fit 4 groups; give 1 to 4"):
        seconds_to_wipe_out(4, 5, 1.0, 1.0)
    with pytest.raises(ConfigError, match="give times above 0"):
        seconds_to_wipe_out(4, 2, 0.0, 1.0)
