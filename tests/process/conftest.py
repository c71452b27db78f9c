"""A calm job that the tests of several files compare with."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def calm_of_three(tmp_path_factory: pytest.TempPathFactory) -> dict[int, set[str]]:
    """Step -> digest of the weights after it, of a run without failures: of one group that computes all pieces of three
    (:mod:`tests.process.three_groups`), whose sums are the same."""
    from tests.process.harness import launch
    from tests.process.returning import voted
    from tests.process.three_groups import GROUPS, PIECES, SIZE, STEPS

    words = ("--steps", str(STEPS), "--pieces", str(GROUPS * PIECES))
    job = launch(tmp_path_factory.mktemp("calm"), *words, groups=1, group_size=SIZE)
    job.finish(timeout_s=200.0)
    return voted(job)
