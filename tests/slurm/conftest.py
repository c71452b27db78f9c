"""Each test of this package has a cluster of virtual nodes of its own, which starts in a third of a second: after a
test that kills nodes Slurm can take a minute until a node is idle again."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.slurm.cluster import DEAD_AFTER_S, PAUSED_FOR_S, Cluster, missing

NODES = 7


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A cluster whose nodes are all idle."""
    with _idle(DEAD_AFTER_S) as cluster:
        yield cluster


@pytest.fixture
def patient_cluster() -> Iterator[Cluster]:
    """The same, for tests of a node that stands still for a while."""
    with _idle(PAUSED_FOR_S) as cluster:
        yield cluster


@contextmanager
def _idle(dead_after_s: int) -> Iterator[Cluster]:
    """Its sockets need a short path."""
    why = missing()
    if why:
        pytest.skip(why)
    with (
        tempfile.TemporaryDirectory(prefix="spare-slurm-") as folder,
        Cluster(Path(folder) / "c", NODES, dead_after_s) as cluster,
    ):
        cluster.until_idle()
        yield cluster
