"""A failure-free job that the tests of several files compare with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="session")
def dense(once: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> str:
    """Digest of what one group of PP2 leaves, which no number of groups and no failure may change."""
    from tests.megatron.test_exact import DENSE, train

    found: str = once("dense", lambda: train(tmp_path_factory.mktemp("dense"), 1, DENSE)[1])
    return found
