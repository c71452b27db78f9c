"""What a learner asks of a donor, and the donor's answers, once both have proved who they are.

Pure: bytes in, bytes out. A request is for the header of a snapshot shard, or for the bytes of the donor's part of it
from an offset on. The answer to the first is the header; to the second, chunk by chunk to the end of the part, each
chunk's words and then its bytes from the offset on (the checksum is of all of the chunk); to both also that it is not
there. All words end with a checksum of their own, so that no damaged number is ever acted on.
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
