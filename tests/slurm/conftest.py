"""One cluster of seven virtual nodes for all tests of this package; a test gets it with every node up and no job."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, missing

NODES = 7


@pytest.fixture(scope="session")
def daemons() -> Iterator[Cluster]:
    """The cluster; its sockets need a short path."""
    why = missing()
    if why:
        pytest.skip(why)
    with tempfile.TemporaryDirectory(prefix="spare-slurm-") as folder, Cluster(Path(folder) / "c", NODES) as cluster:
        yield cluster


@pytest.fixture
def cluster(daemons: Cluster) -> Iterator[Cluster]:
    """Every node is idle before the test, and nothing is queued after it."""
    daemons.until_idle()
    yield daemons
    daemons.clear()
