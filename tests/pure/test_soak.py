"""The pure parts of the chaos soak: the schedule of faults, what is left out, and how growth is measured."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks._chaos import (
    APART_S,
    HUNT_S,
    HUNTS,
    LONG,
    OF_ONE_RANK,
    OF_THE_COORDINATOR,
    PAUSES,
    SHORT,
    WEIGHTS,
    Fault,
    Kind,
    covers,
    schedule,
)
from benchmarks._soak_samples import Sample, growth, slope
from benchmarks._strikes import Strikes

HEARTBEAT_S = 5.0


@given(st.integers(0, 2**32), st.integers(2, 9), st.integers(1, 4))
def test_the_seed_gives_the_schedule(seed: int, groups: int, size: int) -> None:
    """A shorter one is the beginning of a longer one; every target is there, every pause clearly short or long."""
    faults = schedule(seed, 600.0, groups, size, 5.0, HEARTBEAT_S)
    assert faults == schedule(seed, 600.0, groups, size, 5.0, HEARTBEAT_S)
    shorter = schedule(seed, 200.0, groups, size, 5.0, HEARTBEAT_S)
    assert shorter == tuple(fault for fault in faults if fault.at_s < 200.0)
    assert list(faults) == sorted(faults, key=lambda fault: fault.at_s)
    for fault in faults:
        assert set(fault.groups) <= set(range(groups))
        nobody = fault.kind in (*OF_THE_COORDINATOR, *HUNTS)
        assert len(set(fault.groups)) == {Kind.KILL_TWO_GROUPS: 2}.get(fault.kind, 0 if nobody else 1)
        assert (0 <= fault.position < size) == (fault.kind in OF_ONE_RANK)
        assert 0.0 <= fault.apart_s <= (HUNT_S if fault.kind in HUNTS else APART_S)
        in_heartbeats = fault.pause_s / HEARTBEAT_S
        short, long = (low <= in_heartbeats <= high for low, high in (SHORT, LONG))
        assert (short or long) == (fault.kind in PAUSES)
        assert fault.fatal == (fault.kind not in OF_THE_COORDINATOR and not short)


def test_the_draws_are_as_the_weights_and_the_gap_say() -> None:
    faults = schedule(3, 200_000.0, 6, 2, 5.0, HEARTBEAT_S)
    assert len(faults) == pytest.approx(40_000, rel=0.02)
    kinds, total = Counter(fault.kind for fault in faults), sum(WEIGHTS.values())
    for kind, weight in WEIGHTS.items():
        assert kinds[kind] == pytest.approx(len(faults) * weight / total, rel=0.05)
    first = Counter(fault.groups[0] for fault in faults if fault.groups)
    assert len(first) == 6
    assert max(first.values()) < 1.1 * min(first.values())


def test_another_seed_is_another_schedule() -> None:
    assert len({schedule(seed, 60.0, 6, 2, 5.0, HEARTBEAT_S) for seed in range(50)}) == 50


@pytest.mark.parametrize(
    ("groups", "expected"), [((), False), ((0,), False), ((0, 2), True), ((1,), True), ((2, 3), False)]
)
def test_a_shard_without_a_host_is_a_wipe_out(groups: tuple[int, ...], expected: bool) -> None:
    assert covers(groups, [(0, 1), (1, 2), (1, 2, 3)]) == (expected)


def status(run_dir: Path, step: int, **live: int) -> None:
    named = {name.removeprefix("g"): incarnation for name, incarnation in live.items()}
    reported = {"phase": "running", "epoch": 1, "last_step": 100, "num_groups": 3, "load": {}, "failures_masked": 0}
    reported |= {
        "saved_step": 0,
        "loss": None,
        "outcome": "",
        "reason": "",
        "step": step,
        "live": named,
        "learners": {},
    }
    (run_dir / "status.json").write_text(json.dumps(reported))


def test_a_group_that_came_back_is_unhurt_once_it_has_trained(tmp_path: Path) -> None:
    strikes = Strikes(tmp_path, (), [[0, 1, 2]], lambda: 10.0)
    status(tmp_path, 4, g0=0, g1=0)
    assert strikes.unhurt(strikes.look()) == set(), "they may have joined just now"
    status(tmp_path, 7, g0=0, g1=0, g2=1)
    strikes.hurt.add((1, 0))
    assert strikes.unhurt(strikes.look()) == {0}
    status(tmp_path, 10, g0=0, g1=1, g2=1)
    assert strikes.unhurt(strikes.look()) == {0, 2}
    assert strikes.returns == 1


def test_a_fault_where_nobody_is_is_left_out(tmp_path: Path) -> None:
    faults = schedule(1, 60.0, 3, 2, 5.0, HEARTBEAT_S)
    now_s = [60.0]
    strikes = Strikes(tmp_path, faults, [[0, 1, 2]], lambda: now_s[0])
    strikes.act()
    now_s[0] = 200.0
    strikes.act()
    now_s[0] = 300.0
    strikes.act()
    assert strikes.carried_out == 0
    assert strikes.skipped == {"nobody was there": len(faults)}
    assert len((tmp_path / "faults.jsonl").read_text().splitlines()) == len(faults)


@pytest.mark.parametrize(("hosts", "skipped"), [([1], "would be a wipe-out"), ([1, 2], "nobody was there")])
def test_the_last_copy_of_a_state_shard_is_left_alone(tmp_path: Path, hosts: list[int], skipped: str) -> None:
    fault = Fault(1.0, Kind.KILL_GROUP, (1,), -1, 0.0, 0.0, fatal=True)
    strikes = Strikes(tmp_path, (fault,), [[0, 1, 2]], lambda: 10.0)
    ranks = [{"group": group, "position": 0, "pid": None, "incarnation": 0} for group in range(3)]
    (tmp_path / "processes.json").write_text(json.dumps({"ranks": ranks}))
    status(tmp_path, 0, g0=0, g1=0, g2=0)
    reported = json.loads((tmp_path / "status.json").read_text())
    copies = {"due": 2, "hosts": {"0": [0, 2], "1": hosts}, "copying": {}, "unable": {}}
    (tmp_path / "status.json").write_text(json.dumps({**reported, "state_copies": copies}))
    strikes.act()
    assert strikes.skipped == {skipped: 1}


def test_growth_is_measured_within_each_process() -> None:
    """A process that begins later and holds more is no growth."""
    assert slope([[(0.0, 1.0), (1.0, 3.0)], [(5.0, 100.0), (6.0, 102.0)]]) == pytest.approx(2.0)
    assert slope([[(1.0, 1.0)], [(1.0, 9.0)]]) is None
    samples = [
        Sample("rank", pid, at_s, at_s, int(at_s // 30), 4, held + int(at_s // 30), 1, 9.0)
        for pid, held in ((1, 10), (2, 50))
        for at_s in range(0, 190, 10)
    ]
    descriptors, threads, memory = growth([*samples, Sample("leader", 3, 0.0, 0.0, 0, 4, 1, 1, 1.0)])
    assert (descriptors.kind, descriptors.processes, descriptors.returns, descriptors.most) == ("rank", 2, 4, 56)
    assert descriptors.per_return == pytest.approx(1.0)
    assert descriptors.per_minute == pytest.approx(2.0, rel=0.05)
    assert (threads.per_return, memory.per_minute) == (0.0, 0.0)


def test_connections_to_groups_that_are_there_are_no_growth() -> None:
    samples = [Sample("coordinator", 1, 10.0 * n, 10.0 * n, n, 4 + n // 6 * 2, 10 + n // 6, 1, 9.0) for n in range(15)]
    assert growth(samples)[0].per_return == 0.0
