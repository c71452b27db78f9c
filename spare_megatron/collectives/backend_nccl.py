"""A replica communicator on NCCL, for CUDA tensors: raw ``ProcessGroupNCCL``, aborted and built anew at each
epoch. ``shrink`` is not used: it needs the cooperation of live peers in the old communicator.

NCCL forbids that a thread aborts a communicator while another one is inside a call of the same communicator. So one
thread, the owner, makes the group, issues sums, polls for their end and ends them; :meth:`NcclBackend.cut` sets a flag
that the owner polls. Whenever the communicator ends, the owner stops polling, lets another thread abort it, and waits
until nothing runs on the stream any more.

What torch does, as read in the sources of 2.9 and the headers of 2.14.1 (ProcessGroupNCCL.cpp and NCCLUtils.cpp):

* The communicator is non-blocking (``config.blocking = 0``). Its initialisation returns at once; the first call that
  needs it (``NCCLComm::getNcclComm``) polls in ``waitReady`` until it is ready. That holds the communicator's mutex,
  for which ``NCCLComm::abort`` waits too: no other thread could cut it short anyway.
* ``waitReady``, and the wait for a collective that is being issued, end after TORCH_NCCL_NONBLOCKING_TIMEOUT seconds.
  :mod:`spare_megatron.collectives.nccl_start` sets it and whatever else must be set before the process's first call.
* torch keeps the store as a C++ object only: a store in Python whose Python half has died cannot be called any more.
  So it lives here as long as the group does. The id of the communicator is the only thing that passes through it
  (``broadcastUniqueNCCLID``), and every further call is refused: it would be one more sum on the ring.
* With TORCH_NCCL_BLOCKING_WAIT there is no watchdog and no monitor. After an error a watchdog (``Watchdog::runLoop``)
  would write to the store and then sleep for a minute, and the group's destructor waits for it. ``Work.wait`` then
  waits on the host; ``Work.synchronize`` orders streams and does not. An error of NCCL shows in ``Work.is_completed``,
  and ``wait`` of a work that is completed raises it.
* ``abort`` waits for as long as ``ncclCommAbort`` takes, even beyond its own time-out: it joins the thread that runs
  it. On a GPU that is gone that may be forever. So ``abort`` has a thread of its own here. The owner waits for the
  stream, and logs it when that takes long.
* NCCL's kernels run on a stream from torch's pool. With ``is_high_priority_stream`` it is one that no group's
  collectives use; the conversions' stream comes from the pool of priority -1, which torch hands to nobody by itself.

Before NCCL is called, the members sum a number over TCP (:mod:`spare_megatron.collectives.backend_ring`): a peer that
is gone or cannot be reached is found there, and named. Where an initialisation waits for a peer that is dead, nothing
would tell which peer it is. NCCL's unique id takes the same way, as a sum to which one member alone adds.

What cannot be avoided: a peer that dies between that sum and the end of the initialisation, some tenths of a second,
keeps the owner inside torch for the time-out and a second. It keeps its thread and its connections; the communicator
of the next epoch has its own, and forms meanwhile. None of this has run on a GPU: the tests use a stand-in that holds
and calls things as torch does (tests/nccl_as_torch.py).

May assume: one CUDA device for each rank, current on no particular stream; ``nccl_start.prepare`` and
``without_watchdog`` have run. Promises: what :class:`~spare_megatron.collectives.backend.Backend` says; a sum is
complete for every stream when :meth:`end_sum` returns. Importing needs neither CUDA nor NCCL.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from spare_megatron.collectives.backend import BackendError
from spare_megatron.collectives.backend_ring import RingBackend
from spare_megatron.collectives.buckets import ALIGNMENT
from spare_megatron.collectives.converting import ConvertedBucket
from spare_megatron.collectives.nccl_start import unprepared
from spare_megatron.collectives.ring import Shares
from spare_megatron.protocol.messages import Link

log = logging.getLogger(__name__)

POLL_S = 0.0002
SLOW_POLL_S = 0.05
"""Between two looks at a stream that an abort has not emptied for a while."""
PATIENCE = timedelta(days=1)
"""The value of torch's own time-outs, so that they never end anything: this module measures silence itself."""
STREAM_PRIORITY = -1


class RingStore(dist.Store):  # type: ignore[misc,name-defined]  # torch's stubs lack it
    """The store through which torch's process group hands NCCL's unique id from its first rank to the others: one
    value, which travels as a sum over the TCP ring. Every member makes one call, so all take part in that sum; a second
    call would be a sum that no other member takes part in, and is refused."""

    VALUE_BYTES = 4096

    def __init__(self, ring: RingBackend) -> None:
        super().__init__()
        self._ring = ring
        self._used = threading.Lock()

    def set(self, key: str, value: bytes | str) -> None:
        """Send the value to the other members."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        assert len(data) <= self.VALUE_BYTES, f"a value of {len(data)} bytes"
        self._share(key, data)

    def get(self, key: str) -> bytes:
        """The value that the first member sends."""
        return self._share(key, b"")

    def _share(self, key: str, mine: bytes) -> bytes:
        if not self._used.acquire(blocking=False):
            raise RuntimeError(f"only NCCL's unique id passes through this store, not {key!r} after it")
        wire = torch.zeros(8 + self.VALUE_BYTES, dtype=torch.uint8)
        framed = len(mine).to_bytes(8, "big") + mine
        wire[: len(framed)] = torch.tensor(list(framed), dtype=torch.uint8)
        self._ring.sum(wire, wait_for_peers=False)
        data = bytes(wire.tolist())
        return data[8 : 8 + int.from_bytes(data[:8], "big")]


class _Begun(NamedTuple):
    """A sum that has been issued."""

    complete: torch.cuda.Event
    """Recorded behind it."""
    wait_for_peers: bool
    last: Any
    """Its last collective."""
    converted: ConvertedBucket | None


class NcclBackend:
    """The :class:`~spare_megatron.collectives.backend.Backend` on NCCL."""

    reads_sources = False
    converts = True
    in_flight = 3
    """While one moves, the next ones are called: a call takes as long as some ten MiB take to move."""
    forms_alone = False
    linger_s = RingBackend.linger_s

    def __init__(self, ring: RingBackend, rank: int, size: int, timeout_s: float, device: torch.device) -> None:
        """``ring``: a backend of the same members over TCP, which finds those that are gone or have given up, before
        NCCL is called and while it sums."""
        self._reach, self._rank, self._size = ring, rank, size
        self._timeout_s = timeout_s
        self._device = device
        self._group: Any = None
        self._store: RingStore | None = None
        """Kept as long as the group: torch holds only its C++ half."""
        self._stream: torch.cuda.Stream | None = None
        self._issued: torch.cuda.Event | None = None
        """Recorded behind the sum that was issued last; None while a sum is being issued."""
        self._last: Any = None
        """The collective that was issued last."""
        self._begun: deque[_Begun] = deque()
        """Sums that have not ended; kernels may write to what they are converted into until :meth:`halt` has
        returned."""
        self._oldest_s = 0.0
        """When the oldest of them became the oldest."""
        self._aborting: threading.Thread | None = None

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
        self._reach.sum(torch.ones(self._size), wait_for_peers=False)
        why = unprepared()
        if why:
            raise BackendError(why)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = PATIENCE
        options.config.blocking = 0
        options.is_high_priority_stream = True
        self._go_on()
        self._store = RingStore(self._reach)
        self._group = dist.ProcessGroupNCCL(self._store, self._rank, self._size, options)
        self._go_on()
        self._group.eager_connect_single_device(self._device)
        self._stream = torch.cuda.Stream(self._device, priority=STREAM_PRIORITY)
        self.sum(torch.ones(1, device=self._device), wait_for_peers=False)

    def sum(self, wire: torch.Tensor, wait_for_peers: bool) -> None:
        """Sum once."""
        self.begin_sum(wire, wait_for_peers)
        self.end_sum(lambda: False)

    def begin_sum(
        self,
        wire: torch.Tensor,
        wait_for_peers: bool,
        source: torch.Tensor | None = None,
        converted: ConvertedBucket | None = None,
        shares: Shares | None = None,
    ) -> None:
        """Issue the sum of ``wire``, which its writer has settled
        (:meth:`~spare_megatron.collectives.buckets.Buffers.ready_fence`)."""
        assert source is None, "sources are not read here"
        self._go_on()
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            complete, self._issued = torch.cuda.Event(), None
            if shares is not None:
                self._gather(wire, shares)
            elif converted is None:
                self._all_reduce(wire)
            else:
                self._convert(wire, converted)
            complete.record(self._stream)
            self._issued = complete
        if not self._begun:
            self._oldest_s = time.monotonic()
        self._begun.append(_Begun(complete, wait_for_peers, self._last, converted))

    def end_sum(self, more: Callable[[], bool]) -> bool:
        one = self._begun[0]
        while not one.complete.query():
            self._go_on()
            _look(one.last)
            if not one.wait_for_peers and time.monotonic() > self._oldest_s + self._timeout_s:
                raise BackendError(f"NCCL did not complete a sum within {self._timeout_s:g} s")
            if more():
                return False
            time.sleep(POLL_S)
        _look(one.last)
        self._go_on()  # an aborted kernel ends, too
        self._begun.popleft()
        self._oldest_s = time.monotonic()
        return True

    def _all_reduce(self, wire: torch.Tensor) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM  # type: ignore[assignment]  # torch converts it
        self._order(self._group.allreduce([wire], options))

    def _gather(self, wire: torch.Tensor, shares: Shares) -> None:
        """One broadcast for each member that gives something. All get it, also those that do not need it."""
        for rank, (start, stop) in enumerate(pairwise(shares.borders)):
            if start < stop:
                options = dist.BroadcastOptions()
                options.rootRank, options.rootTensor = rank, 0
                self._order(self._group.broadcast([wire[start:stop]], options))
                self._go_on()

    def _convert(self, wire: torch.Tensor, converted: ConvertedBucket) -> None:
        """Reduce-scatter, in place, convert this member's chunk, and gather. Chunks are multiples of ALIGNMENT, so that
        every address is aligned for the widest loads. What is left, fewer than ALIGNMENT elements for each member, is
        summed and converted by all; the first member owns it."""
        chunk = wire.numel() // (self._size * ALIGNMENT) * ALIGNMENT
        whole = chunk * self._size
        mine = slice(self._rank * chunk, (self._rank + 1) * chunk)
        if chunk:
            options = dist.ReduceScatterOptions()
            options.reduceOp = dist.ReduceOp.SUM  # type: ignore[assignment]  # torch converts it
            self._order(self._group._reduce_scatter_base(wire[mine], wire[:whole], options))
            self._go_on()
            converted.convert(mine.start, wire[mine])
            gathered, given = converted.result[:whole], converted.result[mine]
            self._order(self._group._allgather_base(gathered, given))
            self._go_on()
        if whole < wire.numel():
            self._all_reduce(wire[whole:])
            self._go_on()
            converted.convert(whole, wire[whole:], owned=self._rank == 0)

    def _order(self, work: Any) -> None:
        """Let this module's stream go on behind ``work``; the host does not wait."""
        self._last = work
        work.synchronize()

    def cut(self, why: str) -> None:
        self._reach.cut(why)

    def halt(self) -> None:
        """Abort, and wait until nothing touches the buffers of the last sum. That holds also if the abort fails or
        hangs: the buffers stay taken until the stream, or the device, has finished."""
        group, self._group, self._last = self._group, None, None
        if group is None:
            return
        self._aborting = threading.Thread(
            target=self._abort, args=(group, self._issued is None), name="nccl-abort", daemon=True
        )
        self._aborting.start()
        self._drain(self._aborting)
        self._begun.clear()

    def _abort(self, group: Any, unknown: bool) -> None:
        """Run the abort. If it is ``unknown`` what is on the streams, wait for the whole device afterwards."""
        try:
            group.abort()
        except Exception as error:
            log.warning("NCCL could not abort a communicator: %s", f"{error}".partition("\n")[0])
        if unknown:
            try:
                torch.cuda.synchronize(self._device)
            except RuntimeError as error:  # the device has failed: nothing runs on it any more
                log.warning("%s failed: %s", self._device, f"{error}".partition("\n")[0])

    def release(self) -> None:
        self._reach.release()
        self.halt()
        if self._aborting is not None:
            self._aborting.join(self._timeout_s)
            if self._aborting.is_alive():
                log.warning("the abort of an NCCL communicator hangs; where this repeats, replace %s", self._device)

    def _go_on(self) -> None:
        """Raise BackendError when this member or another has given up; called before and after each call of NCCL."""
        if self.over:
            raise BackendError(self.over)

    def _drain(self, aborting: threading.Thread) -> None:
        """Wait until the last sum on the stream has ended. If it is not known which that is, wait for ``aborting``,
        which then waits for the device."""
        began_s, warned = time.monotonic(), False
        while self._runs(aborting):
            took_s = time.monotonic() - began_s
            if took_s > self._timeout_s and not warned:
                warned = True
                log.warning(
                    "NCCL has not ended a sum %g s after its communicator was aborted; its buffers stay taken, and the "
                    "next epoch gets others; where this repeats, replace %s",
                    self._timeout_s,
                    self._device,
                )
            time.sleep(POLL_S if took_s < 1.0 else SLOW_POLL_S)

    def _runs(self, aborting: threading.Thread) -> bool:
        if self._issued is None:
            return aborting.is_alive()
        try:
            return not self._issued.query()
        except RuntimeError:  # the device has failed: nothing runs on it any more
            return False


def _look(work: Any) -> None:
    """Raise what NCCL has reported about a collective."""
    if work.is_completed():
        work.wait()  # which waits for nothing any more
