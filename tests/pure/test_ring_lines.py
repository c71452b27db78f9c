"""What a rank remembers of its connections over epochs is what it would find if it looked again."""

from __future__ import annotations

import socket

from hypothesis import given, settings
from hypothesis import strategies as st

from spare_megatron.collectives.backend import Seat
from spare_megatron.collectives.handshake import Identity, Member
from spare_megatron.collectives.link_monitor import LEFT, RIGHT
from spare_megatron.collectives.ring_line import Line
from spare_megatron.collectives.ring_lines import KINDS, RingLines

ME = Identity(Member(0))
OTHERS = [Member(group) for group in (1, 2, 3, 4)]

CALLS = st.tuples(
    st.just("call"),
    st.sampled_from((LEFT, RIGHT)),
    st.sampled_from(OTHERS),
    st.integers(0, 2),
    st.sampled_from((True, True, True, False)),
)
"""Side, peer, how many epochs the caller is ahead, and whether it proves itself at once."""
STEPS = st.one_of(
    CALLS,
    st.tuples(st.sampled_from(("prove", "end", "drop")), st.integers(0, 30)),
    st.tuples(st.just("view"), st.sampled_from(((1, 2, 3, 4), (1, 2, 4), (3,))), st.booleans()),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(STEPS, max_size=25))
def test_pairs_are_remembered_only_while_they_are_true(steps: list[tuple]) -> None:
    lines, sockets, calls = RingLines(), list[socket.socket](), 0
    seat = Seat(1, (ME.member, *OTHERS), 0, "")
    lines.take(seat)
    for what, *how in steps:
        open_lines = list(lines)
        if what == "call":
            side, peer, ahead, proves = how
            calls += 1
            for kind in KINDS:
                ours, theirs = socket.socketpair()
                sockets += [ours, theirs]
                line = Line(ours, ME, 0.0)
                line.side, line.peer, line.kind, line.number, line.epoch = side, peer, kind, calls, seat.epoch + ahead
                lines.add(line)
                line.handshake.proven = proves
                lines.refresh(line)
        elif what == "view":
            groups, vacated = how
            if vacated:
                lines.take(None)
                assert not lines.pair(LEFT), "there is no neighbour in no epoch"
            seat = Seat(seat.epoch + 1, (ME.member, *(OTHERS[group - 1] for group in groups)), 0, "")
            lines.take(seat)
            _compare(lines, seat)
            lines.settle()
        elif open_lines:
            line = open_lines[how[0] % len(open_lines)]
            if what == "prove":
                line.handshake.proven = True
                lines.refresh(line)
            elif what == "end":
                lines.end(line)
            else:
                lines.drop(line)
        _compare(lines, seat)
    lines.close()
    for one in sockets:
        one.close()


def _compare(lines: RingLines, seat: Seat) -> None:
    """AssertionError where what is remembered is not what one finds who remembers nothing."""
    for side in (LEFT, RIGHT):
        for proven in (False, True):
            anew = RingLines()
            anew._lines, anew._ended = list(lines), lines._ended
            anew.take(seat)
            assert lines.pair(side, proven) == anew.pair(side, proven)
            anew._poll.close()
    strangers = [line for line in lines if not line.proven]
    assert not (lines.settled and strangers), "whoever has not proved itself is watched"
