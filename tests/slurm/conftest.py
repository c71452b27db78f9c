"""Each test of this package has a cluster of virtual nodes of its own, which starts in a third of a second: after a
test that kills nodes Slurm can take a minute until a node is idle again."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, missing

NODES = 7


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A cluster whose nodes are all idle. Its sockets need a short path."""
    why = missing()
    if why:
        pytest.skip(why)
    with tempfile.TemporaryDirectory(prefix="spare-slurm-") as folder, Cluster(Path(folder) / "c", NODES) as cluster:
        cluster.until_idle()
        yield cluster
