"""The weights of a failure-free job that the tests of several files compare with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="session")
def failure_free_of_three(once: Callable[..., Any]) -> dict[int, set[str]]:
    """Step -> the digest of the weights after it that a group votes, of a run of three groups without failures
    (:mod:`tests.process.three_groups`)."""
    from spare_megatron.control_plane.group_aggregation import joined_digests
    from tests.process.returning import failure_free_pipeline
    from tests.process.three_groups import GROUPS, PIECES, SIZE, STEPS

    steps = once(
        "failure-free of three", lambda: [list(ranks) for ranks in failure_free_pipeline(STEPS, GROUPS, PIECES, SIZE)]
    )
    return {step: {joined_digests(ranks)} for step, ranks in enumerate(steps)}
