"""What hostile clients send (benchmarks/_hostile.py): the same for one seed, and words that a job's ports can read."""

from __future__ import annotations

import random

import pytest

from benchmarks._hostile import PREFACE, changed, grpc_call, message, rank_call
from spare_megatron.collectives.handshake import CALL_BYTES, PROOF_BYTES, read_call


def test_a_seed_says_what_is_sent() -> None:
    first, again, other = (
        [message(rng) for _ in range(500)] for rng in (random.Random(1), random.Random(1), random.Random(2))
    )
    assert first == again != other
    assert b"" in first
    assert len(set(first)) > 300


@pytest.mark.parametrize("seed", range(20))
def test_whole_words_are_read(seed: int) -> None:
    rng = random.Random(seed)
    words = rank_call(rng)
    assert len(words) == CALL_BYTES + PROOF_BYTES
    assert read_call(words[:CALL_BYTES]) is not None
    call, at, frames = grpc_call(rng), len(PREFACE), []
    assert call.startswith(PREFACE)
    while at < len(call):
        length = int.from_bytes(call[at : at + 3], "big")
        frames.append(call[at + 3])
        at += 9 + length
    assert at == len(call)
    assert frames == [4, 1, 0]
    assert changed(words, rng) != words
