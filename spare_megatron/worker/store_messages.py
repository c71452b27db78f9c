"""Requests to a group's store and its answers, as bytes. Pure.

A request is a header (operation, number of keys, number of values, time-out in milliseconds, length of what follows)
and its keys, then its values, each with its length before it. An answer is the same with a status in place of the
operation, and values only.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass

_HEADER = struct.Struct("!BIIQQ")
HEADER_BYTES = _HEADER.size
_LENGTH = struct.Struct("!Q")
BODY_BYTES_MAX = 1 << 30
"""The longest body: what a rank reports of its part of a checkpoint may be megabytes."""
FIELDS_MAX = 1 << 20
DONE, TIMED_OUT, REFUSED = 0, 1, 2


class Op(enum.IntEnum):
    """What a request asks for. GET and WAIT wait until all their keys are there."""

    SET = 1
    GET = 2
    WAIT = 3
    CHECK = 4
    ADD = 5
    COMPARE_SET = 6
    DELETE = 7
    APPEND = 8
    COUNT = 9


_SHAPES = {Op.ADD: (1, 1), Op.COMPARE_SET: (1, 2), Op.DELETE: (1, 0), Op.APPEND: (1, 1), Op.COUNT: (0, 0)}
"""Numbers of keys and values. SET has as many of both, GET, WAIT and CHECK any number of keys."""


@dataclass(frozen=True)
class Request:
    """One request."""

    op: Op
    keys: tuple[bytes, ...] = ()
    values: tuple[bytes, ...] = ()
    timeout_s: float = 0.0


@dataclass(frozen=True)
class Answer:
    """The answer to one request: DONE, TIMED_OUT or REFUSED, and values."""

    status: int
    values: tuple[bytes, ...] = ()


def pack_request(request: Request) -> bytes:
    """A request as it is sent."""
    timeout_ms = max(0, round(1e3 * request.timeout_s))
    return _pack(request.op, request.keys, request.values, timeout_ms)


def pack_answer(answer: Answer) -> bytes:
    """An answer as it is sent."""
    return _pack(answer.status, (), answer.values, 0)


def body_bytes(words: bytes | bytearray) -> int | None:
    """The length of what follows a header, with which ``words`` begin; None where they are no header."""
    _, keys, values, _, size = _HEADER.unpack_from(words)
    fits = keys + values <= FIELDS_MAX and size <= BODY_BYTES_MAX
    return size if fits else None


def read_request(words: bytes) -> Request | None:
    """The inverse of :func:`pack_request`; None where these are no such words."""
    code, key_count, value_count, timeout_ms, _ = _HEADER.unpack_from(words)
    fields = _fields(words, key_count + value_count)
    if fields is None or code not in list(Op):
        return None
    op = Op(code)
    shape = _SHAPES.get(op, (key_count, key_count if op is Op.SET else 0))
    if (key_count, value_count) != shape or (op not in _SHAPES and not key_count):
        return None
    return Request(op, fields[:key_count], fields[key_count:], timeout_ms / 1e3)


def read_answer(words: bytes) -> Answer | None:
    """The inverse of :func:`pack_answer`; None where these are no such words."""
    status, key_count, value_count, _, _ = _HEADER.unpack_from(words)
    fields = _fields(words, value_count)
    if fields is None or key_count or status not in (DONE, TIMED_OUT, REFUSED):
        return None
    return Answer(status, fields)


def _pack(code: int, keys: Sequence[bytes], values: Sequence[bytes], timeout_ms: int) -> bytes:
    body = b"".join(part for field in (*keys, *values) for part in (_LENGTH.pack(len(field)), field))
    return _HEADER.pack(code, len(keys), len(values), timeout_ms, len(body)) + body


def _fields(words: bytes, count: int) -> tuple[bytes, ...] | None:
    """The fields of a body, which must end with the last of them."""
    fields, at = [], HEADER_BYTES
    for _ in range(count):
        if len(words) < at + _LENGTH.size:
            return None
        (size,) = _LENGTH.unpack_from(words, at)
        at += _LENGTH.size
        if size > len(words) - at:
            return None
        fields.append(words[at : at + size])
        at += size
    return tuple(fields) if at == len(words) else None
