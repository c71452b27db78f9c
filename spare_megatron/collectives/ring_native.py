"""Calls kernels/ring.cpp, which does the same as ring.py, frames.py and the loop between them. A whole sum is one call,
except for dtypes that torch adds and for conversions that are not compiled.

A sum in Python takes a fifth to a half more CPU time: after each call of the kernel Python finds nothing in the caches.
On the wire both are the same, so a neighbour may use either. Where the library was not built, Python moves the bytes.

May assume: one thread at a time uses a connection, and in one direction only.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from ctypes import CDLL, POINTER, Structure, addressof, c_int32, c_int64, c_uint8, c_void_p, pointer
from enum import IntEnum
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch

from spare_megatron.collectives.converting import ConvertedBucket
from spare_megatron.collectives.link_monitor import Traffic
from spare_megatron.collectives.ring import Packing, Shares
from spare_megatron.config import native_code
from spare_megatron.kernels import native

VERSION = 1000 * native.VERSION + 4
"""What ``spare_ring_version`` of kernels/ring.cpp returns: it calls the kernels that convert."""
_HEAD_ROOM = 16
_TYPES = {torch.int64: 1, torch.int32: 2, torch.float32: 3, torch.float64: 4}
"""Numbers of the dtypes that the library adds; 0 are others, which torch adds."""


class Outcome(IntEnum):
    """Why a call returned."""

    DONE = 0
    OVER = 1
    """The epoch is over for this member."""
    LOST_LEFT = 2
    LOST_RIGHT = 3
    OTHER_SUM = 4
    """A frame came that is not of this sum."""
    ADD = 5
    """Elements are to be added before it goes on."""
    NO_POLL = 6
    """The system call that waits has failed."""
    CONVERT = 7
    """Elements are to be converted before it goes on."""


class _Outgoing(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("epoch", "due")),
        *((name, c_int32) for name in ("open", "head_sent")),
        ("head", c_uint8 * _HEAD_ROOM),
    )


class _Incoming(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("epoch", "due", "broken")),
        *((name, c_int32) for name in ("open", "head_got")),
        ("head", c_uint8 * _HEAD_ROOM),
    )


class _Sum(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("wire", "source", "scratch", "result", "convert", "conversion")),
        ("out", POINTER(_Outgoing)),
        ("coming", POINTER(_Incoming)),
        ("traffic", POINTER(Traffic)),
        *((name, c_int64) for name in ("epoch", "rank", "size", "count", "segment", "first", "sent", "received")),
        *((name, c_int64) for name in ("sent_bytes", "received_bytes", "counted_bytes", "add_start", "add_stop")),
        *((name, c_void_p) for name in ("borders", "hops", "packed_in", "packed_out")),
        *((name, c_int64) for name in ("in_size", "out_size")),
        *((name, c_int64) for name in ("error", "due")),
        *((name, c_int32) for name in ("left", "right", "alarm", "itemsize", "result_itemsize", "type", "converts")),
    )


class Frames:
    """The frames in hand on one connection, where the library moves them; they outlive sums and epochs."""

    def __init__(self) -> None:
        self.outgoing, self.incoming = _Outgoing(), _Incoming()


class Way(NamedTuple):
    """A connection for data."""

    descriptor: int
    frames: Frames


class NativeSum:
    """One member's part of one all-reduce or gather, as :class:`~spare_megatron.collectives.ring.RingStreams` is."""

    def __init__(
        self,
        wire: torch.Tensor,
        rank: int,
        size: int,
        scratch: torch.Tensor,
        source: torch.Tensor | None = None,
        converted: ConvertedBucket | None = None,
        *,
        shares: Shares | None = None,
        packing: Packing | None = None,
        library: CDLL,
    ) -> None:
        """See :class:`~spare_megatron.collectives.ring.RingStreams`."""
        self._go_on: Callable[[_Sum], int] = library.spare_ring_run
        self._wire, self._source, self._scratch = wire, wire if source is None else source, scratch.view(wire.dtype)
        self._converted = converted
        result = wire if converted is None else converted.result
        self._job = _Sum(
            wire=wire.data_ptr(),
            source=self._source.data_ptr(),
            scratch=scratch.data_ptr(),
            rank=rank,
            size=size,
            count=wire.numel(),
            segment=self._scratch.numel(),
            itemsize=wire.itemsize,
            result=result.data_ptr(),
            result_itemsize=result.itemsize,
            type=_TYPES.get(wire.dtype, 0),
            converts=converted is not None,
        )
        if packing is not None and wire.dtype == torch.int64:
            self._job.packed_in, self._job.packed_out = (one.data_ptr() for one in packing)
        if shares is not None:
            self._shares = torch.tensor([*shares.borders, *shares.hops])
            self._job.borders = self._shares.data_ptr()
            self._job.hops = self._shares[size + 1 :].data_ptr()
        self._compiled = None if converted is None else converted.tally.compiled(converted.tensor, wire.dtype)
        if converted is not None and self._compiled is not None:
            self._job.first = converted.start
            self._job.convert = self._compiled.function
            self._job.conversion = addressof(self._compiled.job)

    def run(self, epoch: int, left: Way, right: Way, alarm: int, traffic: Traffic) -> Outcome:
        """Sum, and wait for neighbours, until it is done or cannot go on. Without the interpreter's lock.

        Args:
            alarm: a descriptor that becomes readable when the epoch is over: no byte leaves any more.
            traffic: is kept up to date.
        """
        job = self._job
        job.epoch, job.left, job.right, job.alarm = epoch, left.descriptor, right.descriptor, alarm
        job.coming, job.out = pointer(left.frames.incoming), pointer(right.frames.outgoing)
        job.traffic = pointer(traffic)
        while (outcome := self._go_on(job)) in (Outcome.ADD, Outcome.CONVERT):
            start, stop = job.add_start, job.add_stop
            mine, come = self._source[start:stop], self._scratch[: stop - start]
            if self._converted is not None and outcome == Outcome.CONVERT:
                self._converted.convert(start, mine, come)
            else:
                torch.add(mine, come, out=self._wire[start:stop])
        return Outcome(outcome)

    def words(self, outcome: Outcome) -> str:
        """What has happened, where :meth:`run` could not go on."""
        job = self._job
        if outcome is Outcome.OTHER_SUM:
            return f"a frame of {job.error} bytes came where {job.due} are due"
        return os.strerror(job.error) if job.error else "closed by the other side"


@lru_cache
def compiled_ring() -> CDLL | None:
    """The library beside this file; None where there is none, or none that can be loaded. Raises ConfigError when it
    has another version."""
    loaded = native_code.load_if_built(Path(__file__).parent, "_ring", VERSION, "spare_ring_version")
    if loaded is not None:
        loaded.spare_ring_run.argtypes, loaded.spare_ring_run.restype = (POINTER(_Sum),), c_int32
        loaded.spare_ring_pack.argtypes, loaded.spare_ring_pack.restype = (c_void_p, c_int64, c_void_p), c_int64
        loaded.spare_ring_unpack.argtypes = (c_void_p, c_int64, c_int64, c_void_p)
    return loaded
