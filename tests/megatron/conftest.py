"""A calm job that the tests of several files compare with."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Digest of what one group of PP2 leaves, which no number of groups and no failure may change."""
    from tests.megatron.test_exact import DENSE, train

    return train(tmp_path_factory.mktemp("dense"), 1, DENSE)[1]
