"""The first words between two ranks: they come out as they went in, and a proof is good for one connection only."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from spare_megatron.collectives import handshake

U32 = st.integers(0, (1 << 32) - 1)
CALLS = st.builds(
    handshake.Call,
    st.sampled_from((handshake.DATA, handshake.CONTROL, handshake.STATE)),
    U32,
    st.integers(0, (1 << 64) - 1),
    U32,
    U32,
    st.builds(handshake.Member, U32, U32),
    st.builds(handshake.Member, U32, U32),
    st.binary(min_size=handshake.CHALLENGE_BYTES, max_size=handshake.CHALLENGE_BYTES),
)
ME = handshake.Identity(handshake.Member(3, 1), position=7, job_attempt=2, token="secret")


@given(CALLS)
def test_a_call_comes_out_as_it_went_in(call: handshake.Call) -> None:
    assert len(handshake.pack_call(call)) == handshake.CALL_BYTES
    assert handshake.read_call(handshake.pack_call(call)) == call


@given(st.binary(min_size=handshake.CALL_BYTES, max_size=handshake.CALL_BYTES))
def test_other_words_are_no_call(words: bytes) -> None:
    call = handshake.read_call(words)
    assert call is None or handshake.pack_call(call) == words


def test_a_call_is_for_one_incarnation_at_one_position_of_one_job_attempt() -> None:
    call = handshake.Call(
        handshake.DATA, 2, 5, 1, 7, handshake.Member(2), handshake.Member(3, 1), handshake.challenge()
    )
    assert handshake.is_for(call, ME)
    for other in (
        replace(call, job_attempt=1),
        replace(call, position=6),
        replace(call, callee=handshake.Member(3, 0)),
    ):
        assert not handshake.is_for(other, ME)


@given(CALLS, CALLS)
def test_a_proof_is_of_one_side_of_one_call_with_one_token(call: handshake.Call, other: handshake.Call) -> None:
    words, answer = handshake.pack_call(call), handshake.challenge()
    mine = handshake.proof(ME.key, "caller", words, answer)
    assert len(mine) == handshake.PROOF_BYTES
    assert handshake.proves(mine, handshake.proof(ME.key, "caller", words, answer))
    others = [
        handshake.proof(ME.key, "callee", words, answer),
        handshake.proof(ME.key, "caller", words, handshake.challenge()),
        handshake.proof(replace(ME, token="another").key, "caller", words, answer),
    ]
    others += [handshake.proof(ME.key, "caller", handshake.pack_call(other), answer)] if other != call else []
    assert not any(handshake.proves(mine, one) for one in others)
