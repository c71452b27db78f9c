"""Network faults between the groups of a real ring: the guilty group is lost, in time, and nobody else.

Real replica communicators, sockets and machine (:mod:`tests.process.ring_job`). 100 runs: every position of a ring of 4
and of 6 is guilty once in each of ten ways.
"""

from __future__ import annotations

import contextlib
import random
import signal
import socket

import pytest

from spare_megatron.collectives.backend_ring import RingBackend
from spare_megatron.collectives.ring_links import DIGEST_BYTES
from tests.process.relay import Fault, Mute, Slow, Stalls, Way
from tests.process.replica_job import replica_job
from tests.process.ring_job import RingJob
from tests.process.test_replica import Groups, request_of

TIMEOUT_S = 2.0
PATIENCE_S = 60.0
"""For a job of four steps under any fault, on a loaded machine."""
STRIKE_AFTER = 2
"""The fault comes in the step after this one, or between the two."""
LAST_STEP = 4

MUTE = ("dead", "sends nothing", "receives nothing", "data link")
WEATHER = ("slow", "lossy")
MOMENTS = ("mid-bucket", "before the header")
CASES = [(kind, moment) for kind in MUTE for moment in MOMENTS] + [(kind, "mid-bucket") for kind in WEATHER]
POSITIONS = [(groups, guilty) for groups in (4, 6) for guilty in range(groups)]
RUNS = [(groups, guilty, kind, moment) for groups, guilty in POSITIONS for kind, moment in CASES]
FEW = [
    (4, 1, "data link", "mid-bucket"),
    (6, 5, "data link", "before the header"),
    (4, 3, "sends nothing", "mid-bucket"),
    (6, 0, "receives nothing", "before the header"),
    (4, 2, "dead", "mid-bucket"),
    (4, 0, "lossy", "mid-bucket"),
]


def _fault(kind: str, guilty: int, groups: int, rng: random.Random) -> Fault:
    right = (guilty + 1) % groups
    if kind == "data link":
        return Mute(lambda way: (way.sender, way.receiver, way.kind) == (guilty, right, "D"))
    if kind == "sends nothing":
        return Mute(lambda way: way.sender == guilty)
    if kind == "receives nothing":
        return Mute(lambda way: way.receiver == guilty)
    if kind == "dead":
        return Mute(lambda way: guilty in (way.sender, way.receiver))
    if kind == "slow":
        return Slow(lambda way: guilty in (way.sender, way.receiver), 0.02 * TIMEOUT_S, 400e3)
    return Stalls(lambda way: guilty in (way.sender, way.receiver), (0.05 * TIMEOUT_S, 0.5 * TIMEOUT_S), rng)


def _run(groups: int, guilty: int, kind: str, moment: str, overlapped: bool) -> float | None:
    """One job; time from the fault to the loss of the guilty group."""
    seed = RUNS.index((groups, guilty, kind, moment))
    print(f"{groups} groups, {guilty} {kind}, {moment}, overlapped {overlapped}, seed {seed}")
    rng = random.Random(seed)
    job = RingJob(groups, TIMEOUT_S, LAST_STEP, seed, overlapped)
    try:
        assert job.wait_for(lambda: STRIKE_AFTER in job.committed_s, PATIENCE_S), job.trace

        def data_of_the_guilty(way: Way) -> bool:
            return way.sender == guilty and way.kind == "D"

        after_bytes = rng.randrange(1, 1 << 20) if moment == "mid-bucket" else 0
        job.relay.strike(_fault(kind, guilty, groups, rng), data_of_the_guilty, after_bytes)
        assert job.wait_for(job.finished, PATIENCE_S), "\n".join(job.trace)
        print("\n".join(job.trace[-8:]))
        assert set(job.fenced) == ({guilty} if kind in MUTE else set()), "\n".join(job.trace)
        if kind not in MUTE:
            return None
        took_s = job.fenced[guilty][0] - job.relay.struck_s
        assert took_s < 2 * TIMEOUT_S, "\n".join(job.trace)
        return took_s
    finally:
        job.close()


@pytest.mark.parametrize(("groups", "guilty", "kind", "moment"), FEW)
def test_the_guilty_group_is_lost_and_nobody_else(groups: int, guilty: int, kind: str, moment: str) -> None:
    _run(groups, guilty, kind, moment, overlapped=guilty % 2 == 1)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_every_position_is_guilty_in_every_way() -> None:
    took_s = [_run(*case, overlapped=number % 3 == 0) for number, case in enumerate(RUNS)]
    mute = sorted(one for one in took_s if one is not None)
    print(f"{len(took_s)} runs; fault -> loss: median {mute[len(mute) // 2]:.2f} s, most {mute[-1]:.2f} s")


def test_a_process_that_dies_is_weak_evidence_that_all_members_vote_with() -> None:
    """No farewell comes from it; its neighbours, who give up because of it, are not named."""
    with replica_job(3, 1000, timeout_s=PATIENCE_S) as job:
        job.view(range(3))
        job.sums(range(3))
        job.strike(1, signal.SIGKILL)
        for group in (0, 2):
            line = job.ranks[group].expect(lambda line: line["event"] == "reduced" and not line["ok"])
            assert line["links"] == [[1, 0, False], [1, 2, False]], line


def test_strangers_at_the_door_keep_nobody_out() -> None:
    """Who calls a member's listener and says nothing, or something else, is hung up on when the ring has closed."""
    strangers: list[socket.socket] = []
    place = RingBackend.place

    def visited(backend: RingBackend, listener: socket.socket) -> str:
        for words in (b"", b"GET / HTTP/1.1\r\n\r\n", b"x" * 16):
            stranger = socket.create_connection(listener.getsockname())
            stranger.sendall(words)
            strangers.append(stranger)
        return place(backend, listener)

    RingBackend.place = visited  # type: ignore[method-assign]
    groups = Groups(3)
    try:
        groups.view((0, 1, 2))
        assert all(outcome.ok for outcome in groups.reduce({g: request_of(g) for g in range(3)}).values())
        for stranger in strangers:
            stranger.settimeout(PATIENCE_S)
            with contextlib.suppress(ConnectionResetError):
                heard = stranger.recv(100)
                assert len(heard) in (0, DIGEST_BYTES)
                while heard:
                    heard = stranger.recv(100)
    finally:
        RingBackend.place = place  # type: ignore[method-assign]
        groups.close()
        for stranger in strangers:
            stranger.close()
