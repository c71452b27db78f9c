"""Replica communicators: the sums over the groups, for one rank, through deaths and stops of other groups.

The ranks at one position of all live groups form a communicator for each epoch. The control thread calls
:meth:`ReplicaCommunicators.adopt` for a newer view; it first gives up what belongs to older epochs (protocol
rule 5: notify and drop first), so every peer that waits for this rank wakes within milliseconds, then forms
the new communicator in the background while the training thread may still compute. The training thread calls
:meth:`ReplicaCommunicators.reduce`.

Promises:
- ``adopt`` and ``abandon`` never block; ``reduce`` ends when it is done, failed or its epoch is over,
  whichever is first;
- accumulators are never written, a given-up operation never writes into a buffer that is in use again;
- errors of communication are values: only what ``on_bucket`` itself raises leaves ``reduce``;
- every group that completes a reduction of an epoch has the same sums. That all of them complete it is for
  the vote to find out: after a death some may, some may not.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from spare_megatron.comm.backend import Backend, Seat
from spare_megatron.comm.backend_ring import RingBackend
from spare_megatron.comm.buckets import BUCKET_BYTES, BufferPool, Buffers, Layout
from spare_megatron.comm.communicator import Communicator
from spare_megatron.comm.reduce import ReduceOutcome, Reduction
from spare_megatron.comm.store import StoreClients
from spare_megatron.config.errors import ConfigError

BACKENDS = ("gloo", "gloo-staged", "nccl")
"""The transports, by the names of ``--spare-comm``. 'gloo' stands for sums on the CPU over TCP, as in torch. Inside
the groups that is gloo itself, between them it is :mod:`spare_megatron.comm.backend_ring`, which says why."""
STALE_POLL_S = 0.05
"""``stale`` is asked this often where nothing else wakes the training thread."""
VIEW_GRACE_S = 0.2
"""A lost connection is most often the first sign of a newer epoch: whoever hears of it first drops the old
communicator (protocol rule 5), and a death is known to the coordinator as soon as to its neighbours. An error
waits so long for the view that explains it, because a failed vote costs an epoch and blames somebody."""
QUIET_GRACE_S = 0.2
"""A given-up operation usually lets go of its buffers within milliseconds: waiting that long saves a second set."""
CLOSE_S = 1.0


@dataclass(frozen=True)
class Membership:
    """Who reduces together in one epoch."""

    epoch: int
    groups: tuple[int, ...]
    """Live groups, sorted; a group's rank in the communicator is its index here."""
    position: int
    """Rank position m in the group."""
    store_host: str
    store_port: int
    prefix: str
    """Unique for the job and the coordinator's fencing number."""


class _StaleError(Exception):
    """The epoch of this reduction is over."""


class _FailedError(Exception):
    """The reduction cannot succeed in this epoch."""


class _HookError(Exception):
    """``on_bucket`` raised."""

    def __init__(self, raised: Exception) -> None:
        super().__init__(f"on_bucket raised {raised!r}")
        self.raised = raised


class ReplicaCommunicators:
    """One rank's communicators, at most one of them current. Thread-safe; ``reduce`` is for one thread at a time."""

    def __init__(
        self,
        group: int,
        backend: str,
        device: torch.device | str = "cpu",
        timeout_s: float = 15.0,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """
        Args:
            group: this rank's group.
            backend: 'gloo' (CPU tensors), 'nccl' (CUDA tensors) or 'gloo-staged' (tensors of any device, summed in
                pinned host memory).
            device: where accumulators are and results shall be.
            timeout_s: for meeting the members of an epoch, and for silence once all of them are there. Waiting for
                members that still compute has no limit here: who is late is for the control plane to say.
            bucket_bytes: largest piece of a tensor that is summed at once.
        """
        if backend not in BACKENDS:
            raise ConfigError(
                f"the replica communicators know no backend {backend!r}; use one of {', '.join(BACKENDS)}"
            )
        if backend == "nccl" and not dist.is_nccl_available():
            raise ConfigError("this torch has no NCCL; use --spare-comm gloo, or a torch that is built for CUDA")
        self._group = group
        self._kind = backend
        self._device = torch.device(device)
        self._timeout_s = timeout_s
        self._bucket_bytes = bucket_bytes
        self._clients = StoreClients(timeout_s)
        self._changed = threading.Condition()
        self._epoch = 0
        """Newest epoch adopted."""
        self._over = 0
        """Epochs up to this one are over for this rank."""
        self._adopting = threading.Lock()
        """Held for the moment that an adoption takes: what it starts is known to whoever closes."""
        self._closed = False
        self._stocked: tuple[str, int] | None = None
        self._stocking: threading.Thread | None = None
        self._current: Communicator | None = None
        self._given_up: list[Communicator] = []
        wire_device = self._device if backend == "nccl" else torch.device("cpu")
        self._pool = BufferPool(wire_device, self._device, staged=backend == "gloo-staged")
        _close_at_exit(self)

    @property
    def lingering(self) -> int:
        """Communicators that were given up and still hold threads, connections or buffers."""
        with self._changed:
            return sum(not communicator.gone for communicator in self._given_up)

    @property
    def failure(self) -> str:
        """What broke the present epoch's communicator, empty while it is whole."""
        with self._changed:
            return self._current.error if self._current is not None else ""

    def adopt(self, membership: Membership) -> None:
        """Move to a newer epoch; one that is not newer changes nothing. Control thread. Never blocks."""
        with self._adopting:
            if not self._closed:
                self._adopt(membership)

    def _adopt(self, membership: Membership) -> None:
        member = self._group in membership.groups
        with self._changed:
            if membership.epoch <= self._epoch:
                return
            self._epoch = membership.epoch
            self._over = membership.epoch - member
        self._drop()
        if not member:
            return
        self._stock(membership.store_host, membership.store_port)
        new = Communicator(membership.epoch, membership.groups, self._backend(membership), self._changed)
        with self._changed:
            wanted = self._over < new.epoch
            if wanted:
                self._current = new
            else:
                self._given_up.append(new)
            self._changed.notify_all()
        if not wanted:
            new.give_up()

    def abandon(self) -> None:
        """The present epoch is over: its operations end, here and on its peers. Any thread. Never blocks."""
        with self._changed:
            self._over = self._epoch
        self._drop()

    def reduce(self, epoch: int, request: Reduction, stale: Callable[[], bool]) -> ReduceOutcome:
        """Sum ``request`` over the groups of ``epoch``. Training thread.

        Waits for the epoch to be adopted and for its communicator to form. Returns as soon as the sums are
        there or the epoch is over (a newer ``adopt``, ``abandon``, or ``stale()``), and VIEW_GRACE_S after a
        failure. After an outcome that is not ok the epoch cannot be reduced in again.
        """
        started_s = time.monotonic()
        communicator: Communicator | None = None
        error = ""
        try:
            communicator = self._communicator(epoch, stale)
            self._until(communicator, lambda: communicator.ready, stale)
            buffers = self._buffers(communicator, request, stale)
            scalars = self._exchange(communicator, buffers, request, stale)
            return ReduceOutcome(
                ok=True,
                stale=False,
                tensors=buffers.results,
                scalars=scalars,
                formation_s=communicator.formation_s,
                reduce_s=time.monotonic() - started_s,
            )
        except _HookError as hook:
            error = str(hook)
            raise hook.raised from None
        except _StaleError:
            error = "broken off when the epoch was over"
            return ReduceOutcome(ok=False, stale=True, reduce_s=time.monotonic() - started_s)
        except Exception as failure:
            error = str(failure) or type(failure).__name__
            return ReduceOutcome(
                ok=False,
                stale=False,
                error=error,
                blamed=communicator.blamed if communicator else (),
                formation_s=communicator.formation_s if communicator else 0.0,
                reduce_s=time.monotonic() - started_s,
            )
        finally:
            if communicator is not None and error:
                communicator.spoil(error)

    def close(self) -> None:
        """Give everything up, adopt nothing more, and wait a moment for it to be freed. What still hangs in a
        library then is left to a daemon thread: it holds the process up no longer than this."""
        with self._adopting:
            self._closed = True
        self.abandon()
        until_s = time.monotonic() + CLOSE_S
        with self._changed:
            given_up = list(self._given_up)
        for communicator in given_up:
            communicator.join(until_s)
        if self._stocking is not None:
            self._stocking.join(max(0.0, until_s - time.monotonic()))

    def _backend(self, membership: Membership) -> Backend | None:
        if len(membership.groups) == 1:
            return None
        seat = Seat(
            store_host=membership.store_host,
            store_port=membership.store_port,
            prefix=f"{membership.prefix}/e{membership.epoch}/m{membership.position}",
            rank=membership.groups.index(self._group),
            size=len(membership.groups),
            epoch=membership.epoch,
        )
        if self._kind == "nccl":
            from spare_megatron.comm.backend_nccl import NcclBackend

            return NcclBackend(seat, self._clients, self._timeout_s, self._device)
        return RingBackend(seat, self._clients, self._timeout_s)

    def _communicator(self, epoch: int, stale: Callable[[], bool]) -> Communicator:
        while not stale():
            with self._changed:
                if epoch <= self._over:
                    break
                if self._current is not None and self._current.epoch == epoch:
                    return self._current
                self._changed.wait(STALE_POLL_S)
        raise _StaleError

    def _until(self, communicator: Communicator, reached: Callable[[], bool], stale: Callable[[], bool]) -> None:
        failed_s = 0.0
        while not stale():
            with self._changed:
                if communicator.given_up:
                    break
                if communicator.error:
                    failed_s = failed_s or time.monotonic()
                    if time.monotonic() - failed_s > VIEW_GRACE_S:
                        raise _FailedError(communicator.error)
                elif reached():
                    return
                self._changed.wait(STALE_POLL_S)
        raise _StaleError

    def _buffers(self, communicator: Communicator, request: Reduction, stale: Callable[[], bool]) -> Buffers:
        layout = Layout.of(request.tensors, request.scalars, request.method, self._bucket_bytes)
        until_s = time.monotonic() + QUIET_GRACE_S
        self._until(communicator, lambda: self._pool.free(layout) or time.monotonic() > until_s, stale)
        with self._changed:
            return self._pool.take(layout, communicator)

    def _exchange(
        self, communicator: Communicator, buffers: Buffers, request: Reduction, stale: Callable[[], bool]
    ) -> dict[str, float]:
        """The header goes first and alone: when it is summed, everybody is here with all buckets encoded, and
        silence is a failure."""
        buckets = buffers.layout.buckets
        buffers.write_header(request.scalars)
        for bucket in buckets:
            request.method.encode(request.tensors[bucket.tensor][bucket.start : bucket.stop], buffers.wire(bucket))
        buffers.settle()
        ticket = communicator.submit(buffers.header, patient=True)
        self._until(communicator, lambda: communicator.done >= ticket, stale)
        scalars = buffers.read_header(len(communicator.groups))
        if scalars is None:
            raise _FailedError(
                f"the groups {communicator.groups} do not reduce the same thing: tensors, scalars, reduction method or "
                "bucket size differ"
            )
        for bucket in buckets:
            communicator.submit(buffers.wire(bucket))
        for number, bucket in enumerate(buckets, start=1):
            self._until(communicator, lambda last=ticket + number: communicator.done >= last, stale)
            request.method.decode(buffers.wire(bucket), buffers.result(bucket))
            if request.on_bucket is not None:
                _call(request.on_bucket, number, len(buckets))
        return scalars

    def _stock(self, host: str, port: int) -> None:
        """Fill the reserve of connections to a store that is new to us, in the background."""
        if self._stocked == (host, port):
            return
        self._stocked = (host, port)

        def stock() -> None:
            with contextlib.suppress(ConnectionError, dist.DistError):
                self._clients.stock(host, port)

        self._stocking = threading.Thread(target=stock, name="replicas-stock", daemon=True)
        self._stocking.start()

    def _drop(self) -> None:
        with self._changed:
            old, self._current = self._current, None
            if old is not None:
                self._given_up = [given_up for given_up in self._given_up if not given_up.gone]
                self._given_up.append(old)
            self._changed.notify_all()
        if old is not None:
            old.give_up()


def _call(hook: Callable[[int, int], None], done: int, total: int) -> None:
    try:
        hook(done, total)
    except Exception as error:
        raise _HookError(error) from error


def _close_at_exit(replicas: ReplicaCommunicators) -> None:
    """A thread that comes back from C++ while the interpreter is going down can abort the process."""
    weak = weakref.ref(replicas)

    def close() -> None:
        alive = weak()
        if alive is not None:
            alive.close()

    atexit.register(close)
