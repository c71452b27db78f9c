"""The handshake on a connection between two ranks: each side proves that it knows the job's token, and who it is.

Pure: bytes in, bytes out. Rings (:mod:`spare_megatron.collectives.ring_line`), transfers of state
(:mod:`spare_megatron.transfer`) and a group's store (:mod:`spare_megatron.worker.store_server`) have the sockets and
run the same :class:`Handshake`:

1. The side that accepts sends a *challenge*, 16 random bytes, at once.
2. The caller sends its *call*, without waiting for the challenge: who calls whom, in which job attempt and epoch, for
   what, with a challenge of its own.
3. The callee sends its proof, and only then the caller sends its own.

A proof is a keyed hash (HMAC-SHA256) of both challenges, the call and the prover's side. So it cannot be used again on
another connection, for another call or by the other side. Nothing secret is sent, and bytes of a peer that has not
proved itself are read as a handshake only.

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
"""Of the handshake and of the beats that follow it."""
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
    """The other side is not a rank that this one should be connected with."""


class Member(NamedTuple):
    """One incarnation of a group, as a member of a replica communicator."""

    group: int
    incarnation: int = 0


@dataclass(frozen=True)
class Identity:
    """Who this rank is, and the secret of its job."""

    member: Member
    position: int = 0
    """This rank's position in its group; only ranks of one position are connected with each other."""
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


def call_from(me: Identity, kind: bytes, callee: Member, number: int, epoch: int = 0) -> Call:
    """A new call of this rank."""
    members = {"caller": me.member, "callee": callee}
    return Call(kind, me.job_attempt, epoch, number, me.position, **members, challenge=challenge())


def pack_call(call: Call) -> bytes:
    """A call as it is sent."""
    members = (call.caller.group, call.caller.incarnation, call.callee.group, call.callee.incarnation)
    return _CALL.pack(
        call.challenge, call.kind, _VERSION, call.job_attempt, call.epoch, call.number, call.position, *members
    )


def read_call(words: bytes) -> Call | None:
    """The inverse of :func:`pack_call`; None where ``words`` are no call."""
    known, kind, version, job_attempt, epoch, number, position, *members = _CALL.unpack(words)
    if version != _VERSION or kind not in (DATA, CONTROL, STATE, STORE):
        return None
    caller, callee = Member(*members[:2]), Member(*members[2:])
    return Call(kind, job_attempt, epoch, number, position, caller=caller, callee=callee, challenge=known)


def is_for(call: Call, me: Identity) -> bool:
    """Whether a call is meant for this rank, of this job attempt."""
    return (call.job_attempt, call.position, call.callee) == (me.job_attempt, me.position, me.member)


def proof(key: bytes, who: str, call: bytes, challenged: bytes) -> bytes:
    """The proof of the 'caller' or the 'callee' for a call that the callee answered with ``challenged``."""
    return hmac.new(key, _PARTS[who] + call + challenged, hashlib.sha256).digest()


class Handshake:
    """One side of a connection until the other side has proved itself: what it sends first, how many bytes it waits
    for, and what it sends when these have come."""

    def __init__(self, key: bytes, who: str, first: bytes, due: tuple[int, int]) -> None:
        self.first = first
        """What this side sends at once."""
        self.received = self.proven = False
        """The other side's first words have come; and it has proved itself."""
        self._key, self._who, self._due = key, who, due
        self._call = self._challenged = b""
        self._inbox = b""

    @property
    def missing(self) -> int:
        """How many bytes are still to come before this side sends or is done; 0 when the other side is proven."""
        return 0 if self.proven else self._due[self.received] - len(self._inbox)

    def take(self, more: bytes) -> bytes:
        """Take at most ``missing`` bytes; returns what is to be sent now, perhaps nothing. Raises StrangerError where
        the other side is not who it should be."""
        self._inbox += more
        if self.missing:
            return b""
        words, self._inbox = self._inbox, b""
        if not self.received:
            reply = self._begin(words)
            self.received = True
            return reply
        other = "callee" if self._who == "caller" else "caller"
        if not proves(words, proof(self._key, other, self._call, self._challenged)):
            raise StrangerError("it does not know the job's token")
        self.proven = True
        return self._end()

    def _begin(self, words: bytes) -> bytes:
        """Take the other side's first words; returns the reply."""
        raise NotImplementedError

    def _end(self) -> bytes:
        """The last words of this side."""
        return b""

    def _proof(self) -> bytes:
        return proof(self._key, self._who, self._call, self._challenged)


class Caller(Handshake):
    """The side that makes ``call``."""

    def __init__(self, call: Call, key: bytes) -> None:
        super().__init__(key, "caller", pack_call(call), (CHALLENGE_BYTES, PROOF_BYTES))
        self._call = self.first

    def _begin(self, words: bytes) -> bytes:
        self._challenged = words
        return b""

    def _end(self) -> bytes:
        return self._proof()


class Callee(Handshake):
    """The side that accepted a connection, for calls that it ``wants``."""

    def __init__(self, key: bytes, wants: Callable[[Call], bool]) -> None:
        super().__init__(key, "callee", challenge(), (CALL_BYTES, PROOF_BYTES))
        self._challenged, self._wants = self.first, wants
        self.call: Call | None = None
        """What the other side says about itself; not to be relied on before it is ``proven``."""

    def _begin(self, words: bytes) -> bytes:
        self.call, self._call = read_call(words), words
        if self.call is None or not self._wants(self.call):
            raise StrangerError("its call is for another rank or job attempt, or for something else")
        return self._proof()


def call_in(call: Call, key: bytes, send: Callable[[bytes], object], read: Callable[[int], bytes]) -> None:
    """The caller's side on a connection that blocks: make ``call``, and prove each other. ``read`` returns so many
    bytes. Raises StrangerError where the callee does not prove itself, and what ``send`` and ``read`` raise."""
    side = Caller(call, key)
    send(side.first)
    while side.missing:
        if reply := side.take(read(side.missing)):
            send(reply)


def proves(given: bytes, expected: bytes) -> bool:
    """Whether a proof is the expected one; takes as long for any two."""
    return hmac.compare_digest(given, expected)
