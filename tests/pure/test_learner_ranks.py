"""The ranks of a group that comes back stay together, whenever each of them hears of what happens to its offers."""

from __future__ import annotations

import pytest

from tests.pure.learner_world import SPEC, LearnerWorld


@pytest.mark.parametrize("seed", range(16))
@pytest.mark.parametrize("size", [1, 3])
def test_all_ranks_go_through_offers_and_admission_together(size: int, seed: int) -> None:
    world = LearnerWorld(size, seed)
    assert world.run() == [SPEC.last_step] * size, world.reasons
    assert world.state.outcome == "finished", world.state.outcome_reason
    assert any("joins in epoch" in reason for reason in world.reasons)
