"""A replica communicator on NCCL, for CUDA tensors: raw ``ProcessGroupNCCL``, aborted and built anew at each
epoch. ``shrink`` is not used: it needs the cooperation of live peers in the old communicator.

NCCL forbids that a thread aborts a communicator while another one is inside a call of the same communicator. So one
thread, the owner, makes the group, issues sums, polls for their end and aborts; :meth:`NcclBackend.cut` sets a flag
that the owner polls. Whatever ends the communicator, its owner leaves its wait, aborts, and waits until nothing is on
the stream any more.

That is as quick as the owner's longest wait inside torch. What torch 2.9 to 2.13 does there (NCCLUtils.cpp):

* The communicator is non-blocking (``config.blocking = 0``). Its initialisation returns at once; the first call that
  needs it (``NCCLComm::getNcclComm``) polls in ``waitReady`` until it is ready. That holds the communicator's mutex,
  for which ``NCCLComm::abort`` waits too: no other thread could cut it short anyway.
* ``waitReady``, and the wait for a collective that is being issued, end after TORCH_NCCL_NONBLOCKING_TIMEOUT seconds,
  30 minutes if it is not set, read once in a process. It is set here, to the time-out of this backend.
* Since NCCL 2.22 connections are made by the first collective that needs them, where a member that still computes would
  be waited for inside torch. NCCL_RUNTIME_CONNECT=0 makes all of them in the initialisation.
* Where an initialisation waits for a peer that is dead, nothing tells which peer it is. So before NCCL is called, the
  members sum a number over TCP (:mod:`spare_megatron.collectives.backend_ring`): a peer that is gone or cannot be
  reached is found there, and named. NCCL's unique id takes the same way, as a sum to which one member alone adds.

What cannot be avoided: a peer that dies between that sum and the end of the initialisation, some tenths of a second,
keeps the owner inside torch for the time-out and a second. It keeps its thread and its connections; the communicator
of the next epoch has its own, and forms meanwhile. On a GPU that is gone, ``ncclCommAbort`` may block for ever, and
with it that thread and the buffers of the sum in flight. And torch's watchdog, a thread of torch's own, asks each
communicator for errors, under the mutex above; with the environment below it acts on nothing. None of this has run on a
GPU: the tests use a stand-in for the process group that records which thread calls what.

torch's watchdog must not act on its own, so :data:`ENVIRONMENT` holds while the group is constructed, which
is when torch reads it (torchrun sets other values for its workers).

May assume: one CUDA device for each rank, current on no particular stream. Promises: what
:class:`~spare_megatron.collectives.backend.Backend` says; a sum is complete for every stream when :meth:`sum`
returns. Importing needs neither CUDA nor NCCL.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from spare_megatron.collectives.backend import BackendError
from spare_megatron.collectives.backend_ring import RingBackend
from spare_megatron.collectives.converting import ConvertedBucket
from spare_megatron.controller.messages import Link

ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # an error or time-out of a collective does not end the process
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # nor does an abort that takes long
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # no flight record when a peer dies: that is ordinary here
    "TORCH_NCCL_PROPAGATE_ERROR": "0",  # the control plane tells peers, not the store
    "TORCH_NCCL_BLOCKING_WAIT": "0",  # wait() orders streams; the host polls an event
}
POLL_S = 0.0002
PATIENCE = timedelta(days=1)
"""The value of torch's own time-outs, so that they never end anything: this module measures silence itself."""
_environment_lock = threading.Lock()


class RingStore(dist.Store):
    """The store through which torch's process group hands NCCL's unique id from its first rank to the others: one
    value, which travels as a sum over the TCP ring. Every member makes one call, so all take part in that sum."""

    VALUE_BYTES = 4096

    def __init__(self, ring: RingBackend) -> None:
        super().__init__()
        self._ring = ring

    def set(self, key: str, value: bytes | str) -> None:
        """Tell the other members."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        assert len(data) <= self.VALUE_BYTES, f"a value of {len(data)} bytes"
        self._share(data)

    def get(self, key: str) -> bytes:
        """What the first member tells."""
        return self._share(b"")

    def _share(self, mine: bytes) -> bytes:
        wire = torch.zeros(8 + self.VALUE_BYTES, dtype=torch.uint8)
        told = len(mine).to_bytes(8, "big") + mine
        wire[: len(told)] = torch.tensor(list(told), dtype=torch.uint8)
        self._ring.sum(wire, patient=False)
        data = bytes(wire.tolist())
        return data[8 : 8 + int.from_bytes(data[:8], "big")]


class NcclBackend:
    """The :class:`~spare_megatron.collectives.backend.Backend` on NCCL."""

    reads_sources = False
    converts = True
    forms_alone = False
    linger_s = RingBackend.linger_s

    def __init__(self, ring: RingBackend, rank: int, size: int, timeout_s: float, device: torch.device) -> None:
        """``ring``: a backend of the same members over TCP, which finds those that are gone or have given up, before
        NCCL is called and while it sums."""
        self._reach, self._rank, self._size = ring, rank, size
        self._timeout_s = timeout_s
        self._device = device
        self._group: Any = None
        self._stream: torch.cuda.Stream | None = None
        self._issued: torch.cuda.Event | None = None
        """Recorded behind the sum that was issued last; None while a sum is being issued."""
        self._held: ConvertedBucket | None = None
        """What that sum is converted into: kernels may write to it until the group is released."""
        _bound_waits(timeout_s)

    @property
    def evidence(self) -> frozenset[Link]:
        """What the TCP ring knows: NCCL says that something went wrong, but not where."""
        return self._reach.evidence

    @property
    def over(self) -> str:
        return self._reach.over

    @property
    def formed(self) -> bool:
        return self._stream is not None

    def begin(self, tell: Callable[[], None]) -> None:
        raise NotImplementedError("NCCL keeps whoever connects waiting: that is for the owner")

    def form(self) -> None:
        self._reach.form()
        self._reach.sum(torch.ones(self._size), patient=False)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = PATIENCE
        options.config.blocking = 0
        self._go_on()
        with _environment():
            self._group = dist.ProcessGroupNCCL(RingStore(self._reach), self._rank, self._size, options)
        self._go_on()
        self._group.eager_connect_single_device(self._device)
        self._stream = torch.cuda.Stream(self._device)
        self.sum(torch.ones(1, device=self._device), patient=False)

    def sum(
        self,
        wire: torch.Tensor,
        patient: bool,
        source: torch.Tensor | None = None,
        converted: ConvertedBucket | None = None,
    ) -> None:
        """Sum ``wire``, which its writer has settled (:meth:`~spare_megatron.collectives.buckets.Buffers.settled`)."""
        assert source is None, "sources are not read here"
        self._go_on()
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            complete, self._issued, self._held = torch.cuda.Event(), None, converted
            if converted is None:
                self._all_reduce(wire)
            else:
                self._convert(wire, converted)
            complete.record(self._stream)
            self._issued = complete
        until_s = None if patient else time.monotonic() + self._timeout_s
        while not complete.query():
            self._go_on()
            if until_s is not None and time.monotonic() > until_s:
                raise BackendError(f"NCCL did not complete a sum within {self._timeout_s:g} s")
            time.sleep(POLL_S)
        self._go_on()  # an aborted kernel ends, too

    def _all_reduce(self, wire: torch.Tensor) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM
        self._group.allreduce([wire], options).wait()

    def _convert(self, wire: torch.Tensor, converted: ConvertedBucket) -> None:
        """Reduce-scatter, in place, convert this member's chunk, and gather. What cannot be cut in equal chunks, fewer
        elements than members, is summed and converted by all; the first member owns it."""
        chunk = wire.numel() // self._size
        whole = chunk * self._size
        mine = slice(self._rank * chunk, (self._rank + 1) * chunk)
        if chunk:
            options = dist.ReduceScatterOptions()
            options.reduceOp = dist.ReduceOp.SUM
            self._group._reduce_scatter_base(wire[mine], wire[:whole], options).wait()
            self._go_on()
            converted.convert(mine.start, wire[mine])
            gathered, given = converted.result[:whole], converted.result[mine]
            self._group._allgather_base(gathered, given).wait()
            self._go_on()
        if whole < wire.numel():
            self._all_reduce(wire[whole:])
            self._go_on()
            converted.convert(whole, wire[whole:], owned=self._rank == 0)

    def cut(self, why: str) -> None:
        self._reach.cut(why)

    def release(self) -> None:
        self._reach.release()
        group, self._group = self._group, None
        if group is not None:
            group.abort()
            self._drain()
        self._held = None

    def _go_on(self) -> None:
        """Raise BackendError when this member or another has given up; called before and after each call of NCCL."""
        if self.over:
            raise BackendError(self.over)

    def _drain(self) -> None:
        """Wait until nothing touches the buffer of the last sum any more: an abort ends its kernel, but not at once."""
        with contextlib.suppress(RuntimeError):  # the device has failed: nothing runs on it any more
            if self._issued is None:
                torch.cuda.synchronize(self._device)
            while self._issued is not None and not self._issued.query():
                time.sleep(POLL_S)


def _bound_waits(timeout_s: float) -> None:
    """Bound the waits inside torch and NCCL, for the rest of the process, because they read these variables once; a
    value that a user has set stays."""
    os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(max(1, math.ceil(timeout_s))))
    os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")
    os.environ.setdefault("TORCH_NCCL_RANKS_PER_ROOT", str(1 << 30))  # one unique id, whatever the number of members


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """Set the variables of :data:`ENVIRONMENT` for the time of the context."""
    with _environment_lock:
        before = {name: os.environ.get(name) for name in ENVIRONMENT}
        os.environ.update(ENVIRONMENT)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
