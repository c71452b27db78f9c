"""The ring over a network that loses packets: groups in namespaces of their own (:mod:`tests.process.netns`)."""

from __future__ import annotations

import queue
import random
import time
from collections.abc import Callable, Iterator

import pytest

from spare_megatron.placement import build_placement
from spare_megatron.protocol import messages as m
from spare_megatron.protocol.machine import initial_state, step
from tests.process.netns import Switch, unusable
from tests.process.replica_job import PATIENCE_S, ReplicaJob

WHY_NOT = unusable()
pytestmark = [pytest.mark.full, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "they can be used")]
GROUPS = 4
TIMEOUT_S = 4.0
NUMEL = 64 << 10
Lost = Callable[[int, int], bool]


class NetnsJob:
    """The machine, the step that it has in flight, and ranks that reduce for as long as their epoch lasts."""

    def __init__(self, job: ReplicaJob) -> None:
        self.job, self.base = job, job.epoch
        self.fenced: dict[int, float] = {}
        self.sums: dict[int, int] = {}
        """Group -> its sums in the present epoch."""
        self.trace: list[str] = []
        self.state = initial_state()
        spec = m.JobSpec(GROUPS, 2, build_placement(GROUPS, 2).offsets, "microbatch", 0, 9, 1, "job", PATIENCE_S)
        self.feed(m.Opened(spec, 1, 1))
        for group in range(GROUPS):
            self.feed(m.Hello(group, 0, "job", 0))

    def feed(self, event: m.Event) -> None:
        before = self.state.epoch
        self.state, decision = step(self.state, event)
        self.trace.append(decision.reason)
        for action in decision.actions:
            if isinstance(action, m.SendFenced):
                self.fenced[action.group] = time.monotonic()
        if self.state.epoch > before:
            self.sums = {}
            self.job.epoch = self.base + self.state.epoch - 1
            self.job.view(self.state.live)

    def all_sum(self) -> bool:
        """Every member has had a few sums in the present epoch."""
        return all(self.sums.get(group, 0) > 2 for group in self.state.live)

    def watch(self, done: Callable[[], bool], within_s: float) -> None:
        """Until then: failed reductions become votes, and sums are counted."""
        until_s = time.monotonic() + within_s
        while not done() and time.monotonic() < until_s:
            for group in sorted(self.state.live):
                try:
                    line = self.job.ranks[group].lines.get(timeout=0.002)
                except queue.Empty:
                    continue
                of_epoch = line["epoch"] - self.base if line["event"] == "reduced" else 0
                if of_epoch < 1:
                    continue
                assert line["right"], line
                if not line["ok"] and not line["stale"]:
                    links = tuple(m.Link(*link) for link in line["links"])
                    self.feed(
                        m.Vote(group, 0, m.ReductionResult(1, of_epoch, False, links=links, detail=line["error"]))
                    )
                if line["ok"] and of_epoch == self.state.epoch:
                    self.sums[group] = self.sums.get(group, 0) + 1


@pytest.fixture(scope="module")
def network() -> Iterator[Switch]:
    switch = Switch(GROUPS, seed=15)
    yield switch
    switch.close()


@pytest.fixture(scope="module")
def ranks(network: Switch) -> Iterator[ReplicaJob]:
    ranks = ReplicaJob(NUMEL, 64 << 10, TIMEOUT_S, network.address, network.command)
    try:
        ranks.start(range(GROUPS))
        yield ranks
    finally:
        ranks.close()


@pytest.fixture
def job(network: Switch, ranks: ReplicaJob) -> NetnsJob:
    """A new job attempt, with all groups."""
    network.lost = lambda sender, receiver: False
    return NetnsJob(ranks)


@pytest.mark.parametrize("guilty", range(GROUPS))
@pytest.mark.parametrize("kind", ["dead", "sends nothing", "receives nothing"])
def test_the_group_whose_packets_are_lost_is_lost(network: Switch, job: NetnsJob, kind: str, guilty: int) -> None:
    _find(network, job, kind, guilty)


def test_a_tenth_of_all_packets_lost_costs_nobody(network: Switch, job: NetnsJob) -> None:
    rng = random.Random(10)
    print("seed 10")
    network.lost = lambda sender, receiver: rng.random() < 0.1
    job.watch(lambda: False, 10 * TIMEOUT_S)
    print(job.sums, job.trace)
    assert not job.fenced, job.trace
    network.lost = lambda sender, receiver: False
    job.watch(job.all_sum, PATIENCE_S)
    assert job.all_sum(), job.trace


def _find(network: Switch, job: NetnsJob, kind: str, guilty: int) -> None:
    lost: dict[str, Lost] = {
        "dead": lambda sender, receiver: guilty in (sender, receiver),
        "sends nothing": lambda sender, receiver: sender == guilty,
        "receives nothing": lambda sender, receiver: receiver == guilty,
    }
    job.watch(job.all_sum, PATIENCE_S)
    network.lost = lost[kind]
    struck_s = time.monotonic()
    job.watch(lambda: bool(job.fenced), PATIENCE_S)
    print(job.trace)
    assert set(job.fenced) == {guilty}, job.trace
    assert job.fenced[guilty] - struck_s < 2 * TIMEOUT_S, job.trace
    job.watch(job.all_sum, PATIENCE_S)
    assert job.all_sum(), job.trace
