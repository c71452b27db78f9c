"""The frames of a transfer: a learner's requests and a donor's answers, after the handshake.

Pure: bytes in, bytes out. A request asks for the header of a snapshot shard, or for the bytes of the donor's part from
an offset on. The donor answers the first with the header. It answers the second with the rest of the part, chunk by
chunk: a frame, then the chunk's bytes from the offset on (the checksum in the frame is of the whole chunk). It may also
answer that the snapshot shard is not there yet, or not any more. Each frame ends with a checksum of its own, so a
damaged number is never used.
"""

from __future__ import annotations

import struct
from dataclasses import astuple, dataclass

from spare_megatron.kernels import digest

HEADER, BYTES = b"H", b"B"
"""What is asked for, and what an answer brings."""
LATER, GONE = b"L", b"G"
_REQUEST = struct.Struct("!cQQ")
_ANSWER = struct.Struct("!cIIQQ")
_CHECKSUM = struct.Struct("!Q")
REQUEST_BYTES = _REQUEST.size + _CHECKSUM.size
ANSWER_BYTES = _ANSWER.size + _CHECKSUM.size


class DamageError(Exception):
    """What came is not what was sent."""


@dataclass(frozen=True)
class PartRequest:
    """What a learner asks for."""

    kind: bytes
    """HEADER or BYTES."""
    step: int
    offset: int = 0
    """For BYTES, where in the part to begin; within it."""


@dataclass(frozen=True)
class PartAnswer:
    """What a donor reports before the bytes that it sends."""

    kind: bytes
    """HEADER or BYTES; LATER or GONE, behind which nothing comes."""
    part: int = 0
    parts: int = 0
    """Part ``part`` of ``parts`` is what this donor serves of the offer."""
    length: int = 0
    """How many bytes follow."""
    checksum: int = 0
    """Of the header, or of the whole chunk to which the bytes belong."""


def checksum(data: bytes) -> int:
    """What both sides compute of a header."""
    return digest(data)


def pack_request(request: PartRequest) -> bytes:
    """A request as it is sent."""
    return _sealed(_REQUEST.pack(*astuple(request)))


def read_request(words: bytes) -> PartRequest:
    """The inverse of :func:`pack_request`. Raises DamageError."""
    return PartRequest(*_REQUEST.unpack(_unsealed(words)))


def pack_answer(answer: PartAnswer) -> bytes:
    """An answer as it is sent."""
    return _sealed(_ANSWER.pack(*astuple(answer)))


def read_answer(words: bytes) -> PartAnswer:
    """The inverse of :func:`pack_answer`. Raises DamageError."""
    return PartAnswer(*_ANSWER.unpack(_unsealed(words)))


def _sealed(words: bytes) -> bytes:
    return words + _CHECKSUM.pack(digest(words))


def _unsealed(words: bytes) -> bytes:
    reported, checksum = words[: -_CHECKSUM.size], words[-_CHECKSUM.size :]
    if _CHECKSUM.pack(digest(reported)) != checksum:
        raise DamageError("its words")
    return reported
