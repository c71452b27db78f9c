"""A replica communicator on NCCL, for CUDA tensors: raw ``ProcessGroupNCCL``, aborted and built anew at each
epoch.

What makes it survive peers. ``ncclCommAbort`` ends kernels that wait for a dead peer; torch offers it as
``abort()``, which may itself take a while, so it runs in a thread of its own and the owner never waits on
anything but a CUDA event that it polls. Communicators are non-blocking (``config.blocking = 0``): only then
can an initialisation that waits for a dead peer be aborted too. ``shrink`` is not used: it needs the
cooperation of live peers in the old communicator.

torch's watchdog must not act on its own, so :data:`ENVIRONMENT` holds while the group is constructed, which
is when torch reads it (torchrun sets other values for its workers).

May assume: one CUDA device for each rank, current on no particular stream. Promises: what
:class:`~spare_megatron.comm.backend.Backend` says; a sum is complete for every stream when :meth:`sum`
returns. Importing needs neither CUDA nor NCCL.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from spare_megatron.comm.backend import BackendError, Meeting, Seat
from spare_megatron.comm.store import StoreClients
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
"""For torch's own time-outs: silence is measured here."""
_environment_lock = threading.Lock()


class NcclBackend:
    """See :class:`~spare_megatron.comm.backend.Backend`."""

    linger_s = 0.0
    evidence: frozenset[Link] = frozenset()
    """NCCL says that something went wrong, not where."""

    def __init__(self, seat: Seat, clients: StoreClients, timeout_s: float, device: torch.device) -> None:
        self._seat = seat
        self._clients = clients
        self._timeout_s = timeout_s
        self._device = device
        self._meeting: Meeting | None = None
        self._cut = threading.Event()
        self._aborting = threading.Lock()
        self._aborted = False
        self._group: Any = None
        self._stream: torch.cuda.Stream | None = None

    def form(self) -> None:
        meeting = self._meeting = Meeting(self._seat, self._clients, self._timeout_s)
        meeting.arrive()
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = PATIENCE
        options.config.blocking = 0
        with _environment():
            store = dist.PrefixStore("nccl", meeting.store)
            self._group = dist.ProcessGroupNCCL(store, self._seat.rank, self._seat.size, options)
        if self._cut.is_set():
            raise BackendError("given up")
        self._group.eager_connect_single_device(self._device)
        self._stream = torch.cuda.Stream(self._device)
        self.sum(torch.ones(1, device=self._device), patient=False)
        meeting.part()

    def sum(self, wire: torch.Tensor, patient: bool) -> None:
        """``wire`` was settled by its writer (:meth:`~spare_megatron.comm.buckets.Buffers.settle`)."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            options = dist.AllreduceOptions()
            options.reduceOp = dist.ReduceOp.SUM
            self._group.allreduce([wire], options).wait()
            complete = torch.cuda.Event()
            complete.record(self._stream)
        until_s = None if patient else time.monotonic() + self._timeout_s
        while not complete.query():
            if self._cut.is_set():
                raise BackendError("given up")
            if until_s is not None and time.monotonic() > until_s:
                raise BackendError(f"NCCL did not complete a sum within {self._timeout_s:g} s")
            time.sleep(POLL_S)
        if self._cut.is_set():
            raise BackendError("given up")  # an aborted kernel ends, too

    def cut(self) -> None:
        self._cut.set()

    def unblock(self) -> None:
        if self._meeting is not None:
            self._meeting.leave()
        with self._aborting:
            if self._group is not None and not self._aborted:
                self._aborted = True
                self._group.abort()

    def release(self) -> None:
        self.unblock()
        self._group = None
        if self._meeting is not None:
            self._meeting.end()


@contextlib.contextmanager
def _environment() -> Iterator[None]:
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
