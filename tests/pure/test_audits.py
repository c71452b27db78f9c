"""Which pieces are audited and by whom: the share, the balance, and that everybody agrees without asking."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spare_megatron.placement import build_placement
from spare_megatron.protocol import audits
from spare_megatron.protocol.assign import Assignment, assign, first_assignment
from spare_megatron.protocol.messages import JobSpec


def spec_of(num_groups: int, pieces: int, redundancy: int, rate: float, seed: int = 1) -> JobSpec:
    offsets = build_placement(num_groups, redundancy).offsets
    return JobSpec(num_groups, pieces, offsets, "microbatch", 0, 10, 1, "job", audit_rate=rate, audit_seed=seed)


def test_the_share_is_that_of_the_flag_and_each_step_has_others() -> None:
    spec = spec_of(4, 250, 2, 0.1)
    chosen = [audits.selected(spec, step, range(1000)) for step in range(100)]
    assert sum(map(len, chosen)) == pytest.approx(10_000, rel=0.05)
    assert len(set(chosen)) == 100
    assert audits.selected(replace(spec, audit_seed=2), 1, range(1000)) != chosen[1]


def test_none_and_all() -> None:
    assert audits.selected(spec_of(4, 2, 2, 0.0), 1, range(8)) == ()
    assert audits.selected(spec_of(4, 2, 2, 1.0), 1, (7, 0, 3)) == (7, 0, 3)


def test_a_piece_is_selected_whoever_asks_and_with_whatever_else() -> None:
    spec = spec_of(4, 25, 2, 0.3)
    whole = audits.selected(spec, 5, range(100))
    assert tuple(p for p in range(100) if audits.selected(spec, 5, (p,))) == whole


@pytest.mark.parametrize("dead", [(), (2,), (2, 5)])
@pytest.mark.parametrize("rate", [0.2, 1.0])
def test_audits_are_balanced_among_the_other_hosts(dead: tuple[int, ...], rate: float) -> None:
    spec, placement = spec_of(8, 16, 4, rate), build_placement(8, 4)
    live = tuple(g for g in range(8) if g not in dead)
    plan = assign(placement, live, 16, "microbatch", first_assignment(placement, 16, "microbatch"))
    assert isinstance(plan, Assignment)
    owners, hosts = plan.owner.ravel(), placement.hosts()
    for step in range(1, 6):
        drawn = audits.draw(spec, placement, plan, live, step)
        done = [(group, piece) for group, (pieces,) in drawn.items() for piece in pieces]
        assert sorted(piece for _, piece in done) == sorted(audits.selected(spec, step, range(128)))
        assert all(owners[p] != g and g in hosts[p // 16] and g in live for g, p in done)
        work = {g: int(plan.loads[g]) + len(drawn.get(g, ((),))[0]) for g in live}
        for auditor, piece in done:
            others = [work[g] for g in hosts[piece // 16].tolist() if g in live and g != owners[piece]]
            assert work[auditor] <= min(others) + 1, f"step {step}: {work}"


def test_a_piece_without_a_second_live_host_is_not_audited() -> None:
    placement = build_placement(4, 2)
    live = (0, 1, 2)
    plan = assign(placement, live, 2, "microbatch", first_assignment(placement, 2, "microbatch"))
    assert isinstance(plan, Assignment)
    drawn = audits.draw(spec_of(4, 2, 2, 1.0), placement, plan, live, 1)
    audited = {piece for (pieces,) in drawn.values() for piece in pieces}
    alone = {shard for shard in range(4) if sum(g in live for g in placement.hosts()[shard].tolist()) == 1}
    assert alone
    assert audited == {piece for piece in range(8) if piece // 2 not in alone}
