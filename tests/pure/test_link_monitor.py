"""What the members of a ring receive, in virtual time: together they name the guilty group or nobody, whatever
breaks."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spare_megatron.collectives.beats import WHY_BYTES, pack, unpack
from spare_megatron.collectives.link_monitor import (
    BEATS,
    ENDED_GRACE_S,
    HOLD_ON,
    LEFT,
    RIGHT,
    LinkBeat,
    LinkMonitor,
    Traffic,
)
from spare_megatron.protocol.blame import Culprit, Evidence, culprit
from spare_megatron.protocol.messages import Link, ReductionResult, Vote
from tests.pure.ring_world import TIMEOUT_S, Network, RingWorld, Starved

KINDS = ("dead", "sends nothing", "receives nothing", "data link", "whole link")
SLOW_S = 0.7
"""Of a stall, a delay or a starved member: less than what makes a link silent beside another (hearing.TOGETHER)."""
STOOD_S = 0.01
"""The fault comes when the members have received each other. Who has not called at all may not know of the epoch yet,
which is weak evidence."""
SLACK_S = 0.2
"""For votes and views between two epochs."""


def _silent(kind: str, guilty: int, size: int, begins_s: float) -> Network:
    right = (guilty + 1) % size

    def silent(sender: int, receiver: int, channel: str, now_s: float) -> bool:
        concerned = {
            "dead": guilty in (sender, receiver),
            "sends nothing": sender == guilty,
            "receives nothing": receiver == guilty,
            "data link": (sender, receiver, channel) == (guilty, right, "D"),
            "whole link": (sender, receiver) == (guilty, right),
        }[kind]
        return concerned and now_s >= begins_s

    return Network(silent, lambda *way: 0.002)


def _judged(world: RingWorld, evidence: Evidence, epoch: int) -> tuple[Evidence, Culprit | None]:
    """What the protocol machine makes of the votes, in the order in which they come."""
    found = None
    for member in sorted(world.members, key=lambda member: (member.over_s is None, member.over_s)):
        if member.over_s is not None and found is None:
            vote = Vote(
                member.rank, 0, ReductionResult(1, epoch, False, links=tuple(sorted(member.monitor.links, key=str)))
            )
            evidence = evidence.after(vote)
            found = culprit(evidence, range(world.size), epoch, False)
    return evidence, found


def _suspects(world: RingWorld) -> dict[int, frozenset[int]]:
    return {
        member.rank: frozenset(x.sender for x in member.monitor.links if x.silent and x.receiver == member.rank)
        for member in world.members
    }


def _two_epochs(kind: str, size: int, guilty: int, begins_s: float, seed: int, starved: tuple[Starved, ...]) -> float:
    """The time from the fault to the verdict, infinite where there is none after two epochs. Nobody but the guilty
    group is ever found."""
    rng, network = random.Random(seed), _silent(kind, guilty, size, begins_s)
    first = RingWorld(size, network, starved, rng)
    first.run(begins_s + 3 * TIMEOUT_S)
    assert all(member.over_s is not None for member in first.members), "somebody still waits"
    evidence, found = _judged(first, Evidence(), 1)
    if found is None:
        second = RingWorld(size, network, starved, rng, _suspects(first), first.now_s + 0.02)
        second.run(second.now_s + 3 * TIMEOUT_S)
        found = _judged(second, evidence, 2)[1]
        ends_s = second.now_s
    else:
        ends_s = first.now_s
    if found is None:
        return float("inf")
    assert found.group == guilty, f"group {found.group} is innocent: {found.why}"
    return ends_s - begins_s


@settings(max_examples=60, print_blob=True)
@given(st.sampled_from(KINDS), st.integers(3, 7), st.integers(0, 6), st.floats(STOOD_S, 2.0), st.integers(0, 1 << 30))
@example("whole link", 7, 5, 0.015625, 5)  # silent between the connections and the first beat
def test_the_guilty_group_is_found_within_two_timeouts(
    kind: str, size: int, guilty: int, begins_s: float, seed: int
) -> None:
    took_s = _two_epochs(kind, size, guilty % size, begins_s, seed, ())
    computes_s = 2 * 0.3  # until the others wait for what does not come
    assert took_s < 2 * TIMEOUT_S + SLACK_S + computes_s


@settings(max_examples=60, print_blob=True)
@given(
    st.sampled_from(KINDS),
    st.integers(4, 7),
    st.integers(0, 6),
    st.floats(0.0, 1.0),
    st.integers(0, 1 << 30),
    st.integers(0, 6),
    st.floats(0.0, 2.5),
    st.floats(0.0, SLOW_S / 2),
)
def test_a_starved_member_is_never_found_guilty(
    kind: str, size: int, guilty: int, begins_s: float, seed: int, starved: int, start_s: float, length_s: float
) -> None:
    one = Starved(starved % size, start_s, start_s + length_s * TIMEOUT_S)
    _two_epochs(kind, size, guilty % size, begins_s, seed, (one,))


@settings(max_examples=60, print_blob=True)
@given(st.integers(2, 7), st.integers(0, 1 << 30), st.booleans())
def test_weather_is_no_evidence(size: int, seed: int, everywhere: bool) -> None:
    """Delays up to a good part of the time-out, on all links or on those of one member, members that are starved, and
    members that compute for longer than the time-out."""
    rng = random.Random(seed)

    def delay_s(sender: int, receiver: int, channel: str, now_s: float) -> float:
        slow = everywhere or 0 in (sender, receiver)
        return rng.choice((0.001, 0.01, rng.uniform(0, SLOW_S))) if slow else 0.002

    starts_s = [rng.uniform(0, 6) for _ in range(5)]
    starved = tuple(Starved(rng.randrange(size), s, s + rng.uniform(0, 0.15)) for s in starts_s)
    world = RingWorld(size, Network(lambda *way: False, delay_s), starved, rng, compute_s=1.5 * TIMEOUT_S)
    world.run(8 * TIMEOUT_S)
    for member in world.members:
        assert not member.monitor.over, f"member {member.rank}: {member.monitor.over}"


def _ring_of_four(suspects: tuple[int, ...] = ()) -> LinkMonitor:
    """Rank 1, connected at 0."""
    monitor = LinkMonitor(1, 4, TIMEOUT_S, suspects, 0.0)
    monitor.connect(LEFT, 0.0)
    monitor.connect(RIGHT, 0.0)
    return monitor


def _pass(monitor: LinkMonitor, traffic: Traffic, until_s: float, speaking: tuple[int, ...], beat: LinkBeat) -> float:
    """Rounds until the member gives up: when."""
    now_s = monitor._looked_s
    while now_s < until_s and not monitor.over:
        now_s += TIMEOUT_S / BEATS
        for side in speaking:
            monitor.receive(side, beat, now_s)
        monitor.look(traffic, now_s)
    return now_s


IDLE = LinkBeat(0, False)


def test_silence_for_the_timeout_is_a_silent_link() -> None:
    monitor = _ring_of_four()
    at_s = _pass(monitor, Traffic(), 5.0, (RIGHT,), IDLE)
    assert at_s == pytest.approx(TIMEOUT_S, abs=0.06)
    assert monitor.links == {Link(0, 1, True)}


def test_a_suspect_has_half_the_time_until_it_has_held() -> None:
    monitor = _ring_of_four(suspects=(0,))
    assert _pass(monitor, Traffic(), 5.0, (RIGHT,), IDLE) == pytest.approx(TIMEOUT_S / 2, abs=0.06)
    held = _ring_of_four(suspects=(0,))
    assert _pass(held, Traffic(), 2.5, (LEFT, RIGHT), IDLE) >= 2.5
    assert _pass(held, Traffic(), 9.0, (RIGHT,), IDLE) == pytest.approx(3.5, abs=0.11)


def test_bytes_that_were_sent_and_do_not_come_are_a_silent_link_though_beats_come() -> None:
    monitor = _ring_of_four()
    traffic = Traffic(received=100, wants=True)
    assert _pass(monitor, traffic, 5.0, (LEFT, RIGHT), LinkBeat(200, True)) == pytest.approx(TIMEOUT_S, abs=0.11)
    assert monitor.links == {Link(0, 1, True)}


def test_nobody_is_silent_whose_bytes_are_not_wanted() -> None:
    monitor = _ring_of_four()
    assert _pass(monitor, Traffic(received=100), 5.0, (LEFT, RIGHT), LinkBeat(200, True)) >= 5.0


def test_what_fell_silent_with_the_first_is_named_too() -> None:
    monitor = _ring_of_four()
    monitor.receive(RIGHT, IDLE, 0.05)
    monitor.receive(LEFT, LinkBeat(0, False, True, frozenset({Link(2, 3, True)})), 0.1)
    assert monitor.links == {Link(2, 3, True)}, "the right neighbour was just received"
    monitor = _ring_of_four()
    _pass(monitor, Traffic(), 0.9, (LEFT,), IDLE)
    monitor.receive(LEFT, LinkBeat(0, False, True, frozenset({Link(2, 3, True)})), 0.9)
    assert monitor.links == {Link(2, 3, True), Link(2, 1, True)}


def test_an_end_without_a_close_message_is_weak_evidence_after_a_grace() -> None:
    monitor = _ring_of_four()
    monitor.end(RIGHT, 0.1)
    assert monitor.over
    assert monitor.links == frozenset()
    now_s = 0.1
    while now_s < 0.1 + 2 * ENDED_GRACE_S:
        now_s += TIMEOUT_S / BEATS
        monitor.look(Traffic(), now_s)
        if abs(now_s - 0.1 - ENDED_GRACE_S) > 0.01:
            assert monitor.links == ({Link(2, 1, False)} if now_s > 0.1 + ENDED_GRACE_S else set())


def test_a_neighbour_in_a_newer_epoch_ends_this_one_and_is_neither_named_nor_reported_on() -> None:
    monitor = LinkMonitor(1, 3, TIMEOUT_S, (), 0.0)
    for side in (LEFT, RIGHT):
        monitor.connect(side, 0.0)
        monitor.receive(side, LinkBeat(0, False), 0.0)
    before = monitor.version
    monitor.move_on(RIGHT, 0.1)
    monitor.end(RIGHT, 0.1)
    monitor.look(Traffic(), 0.1 + 2 * ENDED_GRACE_S)
    assert monitor.over == "rank 2 of the ring is in a newer epoch"
    assert not monitor.links
    assert monitor.version == before, "the other neighbour gets the view itself"
    assert monitor.beat(LEFT, Traffic()).closing, "and receives it with the next beat"
    monitor.give_up("its tensors differ")
    assert (monitor.version > before, monitor.beat(LEFT, Traffic()).why) == (True, "its tensors differ")


def test_who_says_close_message_is_not_named_when_its_connections_end() -> None:
    monitor = _ring_of_four()
    monitor.end(RIGHT, 0.1)
    version = monitor.version
    monitor.receive(RIGHT, LinkBeat(0, False, closing=True, why="its tensors differ"), 0.15)
    monitor.look(Traffic(), 0.6)
    assert monitor.links == frozenset()
    assert monitor.over == "rank 2 of the ring gave up: its tensors differ"
    assert monitor.version > version, "the left neighbour was only notified that a connection ended"


def test_the_first_reason_goes_round_the_ring() -> None:
    monitor = _ring_of_four()
    monitor.receive(RIGHT, LinkBeat(0, False, closing=True, why="its tensors differ"), 0.1)
    monitor.receive(LEFT, LinkBeat(0, False, closing=True, why="its disk is full"), 0.2)
    monitor.give_up("given up")
    assert monitor.over == "rank 2 of the ring gave up: its tensors differ"
    assert monitor.beat(LEFT, Traffic()).why == "its tensors differ"


def test_the_time_in_which_this_process_did_not_run_is_nobodys_silence() -> None:
    monitor = _ring_of_four()
    _pass(monitor, Traffic(), 0.5, (LEFT, RIGHT), IDLE)
    monitor.look(Traffic(), 30.0)
    assert not monitor.over


def test_a_member_that_does_not_take_part_is_named_weakly_one_that_waits_itself_is_not() -> None:
    traffic = Traffic(received=100, wants=True, wait_for_peers=False)
    absent, waiting = _ring_of_four(), _ring_of_four()
    assert _pass(absent, traffic, 5.0, (LEFT, RIGHT), LinkBeat(100, False)) == pytest.approx(TIMEOUT_S, abs=0.11)
    assert absent.links == {Link(0, 1, False)}
    assert _pass(waiting, traffic, 9.0, (LEFT, RIGHT), LinkBeat(100, True)) == pytest.approx(
        HOLD_ON * TIMEOUT_S, abs=0.11
    )
    assert waiting.links == frozenset()


@given(
    st.integers(0, 1 << 62),
    st.booleans(),
    st.booleans(),
    st.frozensets(st.builds(Link, st.integers(0, 1 << 30), st.integers(0, 1 << 30), st.booleans()), max_size=64),
    st.text(max_size=WHY_BYTES // 4),
    st.sampled_from(["", "127.0.0.1:40000", "[2001:db8::17]:1"]),
    st.integers(0, 12),
)
@example(0, False, False, frozenset(), "", "", 1)
def test_a_beat_comes_out_as_it_went_in(
    sent: int, wants: bool, closing: bool, links: frozenset[Link], why: str, right_at: str, cut: int
) -> None:
    beat = LinkBeat(sent, wants, closing, links, why, right_at)
    inbox = bytearray(pack(sent + 1, beat)[:-cut] if cut else pack(sent + 1, beat))
    if cut:
        assert unpack(inbox) is None
        inbox = bytearray(pack(sent + 1, beat))
    inbox += b"next"
    assert unpack(inbox) == (sent + 1, beat)
    assert inbox == b"next"
