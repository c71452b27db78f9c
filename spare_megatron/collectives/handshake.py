"""The first words on a connection between two ranks: each proves that it knows the job's token, and says who it is.

Pure: bytes in, bytes out; :mod:`spare_megatron.collectives.ring_links` and :mod:`spare_megatron.transfer` have the
sockets. The side that accepts speaks at once, whoever calls: a *challenge*, 16 random bytes, so that the caller
receives it even where its own words are lost. The caller sends its *call*: who calls whom, in which job attempt and
epoch, for what, with a challenge of its own. Then the callee proves itself, and only then the caller. A proof is a
keyed hash (HMAC-SHA256) of both challenges, the call and the prover's part in it, so none can be used again on another
connection, for another call or by the other side. Nothing secret is sent, and what comes from a peer that has not
proved itself is never read as anything but these words.

This keeps out processes that do not know the token, and those of another job attempt, position or incarnation. It does
not hide what is sent.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

DATA, CONTROL, STATE, STORE = b"D", b"C", b"S", b"T"
CHALLENGE_BYTES = 16
PROOF_BYTES = 32
_VERSION = 2
"""Of these words and of the beats that follow them."""
_CALL = struct.Struct("!16scBIQIIIIII")
"""Challenge, kind, version, job attempt, epoch, number, position, group and incarnation of the caller, then of the
callee."""
CALL_BYTES = _CALL.size
STRANGERS_MAX = 64
"""The most accepted connections of a listener that have not proved themselves; the oldest ones are closed first."""
STRANGER_S = 10.0
"""How long a connection that was accepted may take to prove itself."""
_PARTS = {"callee": b"spare callee", "caller": b"spare caller"}


class StrangerError(Exception):
    """The other side is not a rank that this one should speak with."""


class Member(NamedTuple):
    """One incarnation of a group, as a member of a replica communicator."""

    group: int
    incarnation: int = 0


@dataclass(frozen=True)
class Identity:
    """Who this rank is, and the secret of its job."""

    member: Member
    position: int = 0
    """This rank's position in its group; only ranks of one position speak with each other."""
    job_attempt: int = 1
    token: str = ""

    @property
    def key(self) -> bytes:
        """The key of all proofs."""
        return hashlib.sha256(b"spare replica ring" + self.token.encode()).digest()


@dataclass(frozen=True)
class Call:
    """What a caller says about itself and about the connection that it makes."""

    kind: bytes
    """DATA or CONTROL, between ring neighbours; STATE, from a learner to a donor; STORE, from a rank to its group's
    store, which position 0 serves. A store has no rank that calls it: all ranks call as that position."""
    job_attempt: int
    epoch: int
    """The caller's epoch; 0 for STATE and STORE."""
    number: int
    """Of a ring's connections: it grows with each call of this caller, and both of a pair have the same. For STATE the
    number of the offer, for STORE that of the store."""
    position: int
    caller: Member
    callee: Member
    challenge: bytes


def challenge() -> bytes:
    """A new challenge."""
    return secrets.token_bytes(CHALLENGE_BYTES)


def pack_call(call: Call) -> bytes:
    """A call as it is sent."""
    members = (call.caller.group, call.caller.incarnation, call.callee.group, call.callee.incarnation)
    return _CALL.pack(
        call.challenge, call.kind, _VERSION, call.job_attempt, call.epoch, call.number, call.position, *members
    )


def read_call(words: bytes) -> Call | None:
    """The inverse of :func:`pack_call`; None where these are no such words."""
    known, kind, version, job_attempt, epoch, number, position, *members = _CALL.unpack(words)
    if version != _VERSION or kind not in (DATA, CONTROL, STATE, STORE):
        return None
    return Call(kind, job_attempt, epoch, number, position, Member(*members[:2]), Member(*members[2:]), known)


def is_for(call: Call, me: Identity) -> bool:
    """Whether a call is meant for this rank, of this job attempt."""
    return (call.job_attempt, call.position, call.callee) == (me.job_attempt, me.position, me.member)


def proof(key: bytes, who: str, call: bytes, challenged: bytes) -> bytes:
    """The proof of the 'caller' or the 'callee' for a call that the callee answered with ``challenged``."""
    return hmac.new(key, _PARTS[who] + call + challenged, hashlib.sha256).digest()


def call_in(call: Call, key: bytes, send: Callable[[bytes], object], read: Callable[[int], bytes]) -> None:
    """The caller's side on a connection: make ``call``, and prove each other. ``read`` returns so many bytes. Raises
    StrangerError where the callee does not prove itself, and what ``send`` and ``read`` raise."""
    words = pack_call(call)
    send(words)
    challenged = read(CHALLENGE_BYTES)
    if not proves(read(PROOF_BYTES), proof(key, "callee", words, challenged)):
        raise StrangerError("it does not know the job's token")
    send(proof(key, "caller", words, challenged))


def proves(given: bytes, expected: bytes) -> bool:
    """Whether a proof is the expected one; takes as long for any two."""
    return hmac.compare_digest(given, expected)
