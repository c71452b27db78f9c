"""What a donor keeps of an offer at most, what it says beyond that, and that the coordinator reports it once."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spare_megatron.coordinator.journal import Record
from spare_megatron.coordinator.records import Records
from spare_megatron.protocol.machine import step as machine_step
from spare_megatron.protocol.messages import Withdrawn
from spare_megatron.runtime.run_directory import RunDirectory
from spare_megatron.worker.donor import OfferBudget
from tests.pure.scenario import Player

MB = 10**6
BUDGET = OfferBudget(step=10, parts=2, state_bytes=14 * MB, began_s=100.0)


def verdict(results: int, step: int, result_bytes: int = 8 * MB, state: bool = True, most: int = 16) -> str:
    """At step ``step``, when ``results`` of the results since step 10 are not taken, and perhaps the state."""
    kept = dict.fromkeys(range(step - results, step), result_bytes) | ({10: BUDGET.state_bytes} if state else {})
    return BUDGET.too_much(kept, 7 * MB, result_bytes, step, 100.0 + 0.5 * (step - 10), most)


@pytest.mark.parametrize(
    ("result_bytes", "most"),
    [(8 * MB, 32 * MB), (7 * MB, 28 * MB), (2 * MB, 28 * MB), (1000, 28 * MB), (100 * MB, 400 * MB), (0, 28 * MB)],
)
def test_the_bytes_of_results(result_bytes: int, most: int) -> None:
    assert BUDGET.most_bytes(result_bytes) == most


def test_the_last_result_that_is_kept() -> None:
    assert [bool(verdict(n, 10 + n + 1)) for n in range(6)] == [False] * 4 + [True] * 2
    assert [bool(verdict(n, 10 + n + 1, 2 * MB)) for n in (12, 13, 14)] == [False, False, True]
    assert [bool(verdict(n, 10 + n + 1, 10)) for n in (14, 15)] == [False, True], "snapshot shards, with the state"
    assert [bool(verdict(n, 10 + n + 1, 10, state=False)) for n in (15, 16)] == [False, True]


def test_what_is_said() -> None:
    assert verdict(4, 15) == (
        "the learner has not taken 4 results, 32 MB here; it cannot keep up with the steps: a result of 16 MB each "
        "0.5 s needs 32 MB/s at each position, and about 5.6 MB/s were had"
    )


@given(st.floats(0.0, 1.0), st.floats(0.01, 1.0), st.floats(0.1, 20.0), st.integers(1, 4))
def test_a_learner_that_can_keep_up_is_never_left(used: float, share: float, state_results: float, parts: int) -> None:
    """``share``: what a result takes of a step's time; ``used``: how late in the first step the transfer begins."""
    result_bytes, step_s = 1000, 1.0
    budget = OfferBudget(0, parts, int(state_results * result_bytes), 0.0)
    rate = result_bytes / (share * step_s)
    # When the learner has each snapshot shard, and asks for the next one; result n comes up at n.
    had_s = [used + budget.state_bytes / rate]
    for number in itertools.count(1):
        if number > 60:
            break
        kept = {n: result_bytes for n in range(1, number) if n >= len(had_s) or had_s[n] > number}
        kept |= {0: budget.state_bytes} if had_s[0] > number else {}
        assert not budget.too_much(kept, 0, result_bytes, number, float(number), 10_000)
        had_s.append(max(had_s[-1], float(number)) + share * step_s)


def test_the_first_withdrawal_from_a_learner_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    player, records = Player(), Records(RunDirectory(tmp_path))
    for command in ("open N=3 K=1 r=2 steps=9", "hello 0,1,2", "lost 1", "hello 1 inc=1", "ready 1", "vote all"):
        player.play(command)

    def withdraw(number: int) -> None:
        before = player.state
        event = Withdrawn(0, 0, number, "rank 0: too slow")
        player.state, decision = machine_step(before, event)
        record = Record(1, 0.0, decision.epoch, event, (), decision.reason)
        records.observe(record, before, decision, player.state, 0.0, live=True)

    withdraw(7)
    assert capsys.readouterr().out == ""
    withdraw(1)
    why = "spare: group 0 does not serve offer 1 to group 1 any more: rank 0: too slow\n"
    assert capsys.readouterr().out == why
    withdraw(1)
    player.play("ready 1")
    player.play("vote all")
    assert [offer.number for offer in player.state.offers] == [2]
    withdraw(2)
    assert capsys.readouterr().out == "", "once for each learner"
    again = Records(RunDirectory(tmp_path))
    again.recall({**records.memo()})
    assert again.memo() == records.memo()
    older = {name: value for name, value in records.memo().items() if name != "withdrawals"}
    again = Records(RunDirectory(tmp_path))
    again.recall(older)
    assert again.memo()["withdrawals"] == []
