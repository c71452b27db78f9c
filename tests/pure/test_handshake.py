"""The first words between two ranks: they come out as they went in, and a proof is good for one connection only."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from spare_megatron.collectives.handshake import (
    CALL_BYTES,
    CHALLENGE_BYTES,
    CONTROL,
    DATA,
    PROOF_BYTES,
    STATE,
    Call,
    Identity,
    Member,
    challenge,
    is_for,
    pack_call,
    proof,
    proves,
    read_call,
)

U32 = st.integers(0, (1 << 32) - 1)
CALLS = st.builds(
    Call,
    st.sampled_from((DATA, CONTROL, STATE)),
    U32,
    st.integers(0, (1 << 64) - 1),
    U32,
    U32,
    st.builds(Member, U32, U32),
    st.builds(Member, U32, U32),
    st.binary(min_size=CHALLENGE_BYTES, max_size=CHALLENGE_BYTES),
)
ME = Identity(Member(3, 1), position=7, job_attempt=2, token="secret")


@given(CALLS)
def test_a_call_comes_out_as_it_went_in(call: Call) -> None:
    assert len(pack_call(call)) == CALL_BYTES
    assert read_call(pack_call(call)) == call


@given(st.binary(min_size=CALL_BYTES, max_size=CALL_BYTES))
def test_other_words_are_no_call(words: bytes) -> None:
    call = read_call(words)
    assert call is None or pack_call(call) == words


def test_a_call_is_for_one_incarnation_at_one_position_of_one_job_attempt() -> None:
    call = Call(DATA, 2, 5, 1, 7, Member(2), Member(3, 1), challenge())
    assert is_for(call, ME)
    for other in (replace(call, job_attempt=1), replace(call, position=6), replace(call, callee=Member(3, 0))):
        assert not is_for(other, ME)


@given(CALLS, CALLS)
def test_a_proof_is_of_one_side_of_one_call_with_one_token(call: Call, other: Call) -> None:
    words, answer = pack_call(call), challenge()
    mine = proof(ME.key, "caller", words, answer)
    assert len(mine) == PROOF_BYTES
    assert proves(mine, proof(ME.key, "caller", words, answer))
    others = [
        proof(ME.key, "callee", words, answer),
        proof(ME.key, "caller", words, challenge()),
        proof(replace(ME, token="another").key, "caller", words, answer),
    ]
    others += [proof(ME.key, "caller", pack_call(other), answer)] if other != call else []
    assert not any(proves(mine, one) for one in others)
