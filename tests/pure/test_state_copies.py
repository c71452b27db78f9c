"""The mean time until all copies of a state shard are lost: the formula, and a simulation that draws single losses."""

from __future__ import annotations

import random
from math import inf

import pytest

from spare_megatron.config.errors import ConfigError
from spare_megatron.planning.state_copies import seconds_to_wipe_out


def simulated_s(groups: int, copies: int, mtbf_s: float, copying_s: float, ends: int) -> float:
    """The mean time between wipe-outs. Each chain of losses begins with shards on sets of groups that are drawn, no
    two alike; a group that is lost is back when its shards have their copies again."""
    dice = random.Random(groups * 100 + copies)
    total_s, wiped_out = 0.0, 0
    while wiped_out < ends:
        total_s += dice.expovariate(groups / mtbf_s)
        lost, hosts, over = [dice.randrange(groups)], set[frozenset[int]](), copies == 1
        while not over and (next_s := dice.expovariate((groups - len(lost)) / mtbf_s)) < copying_s:
            total_s += next_s
            lost.append(dice.choice([one for one in range(groups) if one not in lost]))
            while len(hosts) < groups:
                hosts.add(frozenset(dice.sample(range(groups), copies)))
            over = any(one <= set(lost) for one in hosts)
        total_s += 0.0 if over else copying_s
        wiped_out += over
    return total_s / wiped_out


@pytest.mark.parametrize(("groups", "copies", "copying"), [(5, 2, 0.02), (8, 2, 0.05), (8, 3, 0.1), (6, 1, 0.1)])
def test_the_formula_is_what_a_simulation_finds(groups: int, copies: int, copying: float) -> None:
    """``copying`` is a part of the time between losses of one group; 10000 wipe-outs have an error of 1 %."""
    found = simulated_s(groups, copies, 1.0, copying, ends=10_000)
    assert found == pytest.approx(seconds_to_wipe_out(groups, copies, 1.0, copying), rel=0.02)


def test_one_copy_lasts_until_the_first_loss_and_no_copying_forever() -> None:
    assert seconds_to_wipe_out(8, 1, 800.0, 3.0) == 100.0
    assert seconds_to_wipe_out(8, 2, 800.0, 0.0) == inf


def test_rare_losses_have_the_textbook_rate() -> None:
    """Two losses of one of N pairs, the second within w: N * 2 * x * x * w."""
    assert 1 / seconds_to_wipe_out(10, 2, 1e6, 1.0) == pytest.approx(10 * 2 * 1e-6**2, rel=1e-4)


def test_impossible_figures_are_refused() -> None:
    with pytest.raises(ConfigError, match="5 copies of each state shard do not fit 4 groups; give 1 to 4"):
        seconds_to_wipe_out(4, 5, 1.0, 1.0)
    with pytest.raises(ConfigError, match="give times above 0"):
        seconds_to_wipe_out(4, 2, 0.0, 1.0)
