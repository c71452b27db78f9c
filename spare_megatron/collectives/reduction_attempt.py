"""One attempt to reduce a step's gradients in one epoch, from the first bucket that is final to the outcome.

The order of a communicator's operations is fixed: a header with the layout's digest, the buckets of the tensors in
their order, and, where reductions may overlap what computes the tensors (:attr:`Reduction.overlapped`), a second
header with the scalars. So members need not agree on when a bucket leaves, nor on whether they overlap at all: one may
send buckets from the middle of its backward pass to another that has long finished.

May assume: :meth:`OpenReduction.ready` and :meth:`OpenReduction.spoil` are called by the training thread or by one that
it waits for (autograd's). Promises: accumulators are never written; only :meth:`OpenReduction.finish` waits; calls for
an epoch that is over do nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from spare_megatron.collectives.buckets import BucketLayout, BufferPool, Buffers, Header, overlapped_bytes
from spare_megatron.collectives.communicator import Communicator
from spare_megatron.collectives.reduction import ReduceOutcome, Reduction

STALE_POLL_S = 0.05
"""The interval at which ``stale`` is called while nothing else wakes the training thread."""
VIEW_GRACE_S = 0.2
"""How long a failed attempt waits for the view that explains the failure. A lost connection is most often the first
sign of a newer epoch: the member that learns of it first drops the old communicator (protocol rule 5), and the
coordinator knows of a death as soon as its neighbours do. A failed vote instead costs an epoch and blames somebody."""
MUTE_GRACE_S = 0.05
"""How long a failed attempt waits where a link is mute, which no view explains: until all members have told each other
what they know of their links."""
QUIET_GRACE_S = 0.2
"""How long an attempt waits for the buffers of an operation that was given up, which are most often free within
milliseconds, before it makes a second set."""


class StaleError(Exception):
    """The epoch of this reduction is over."""

    def __init__(self) -> None:
        super().__init__("broken off when the epoch was over")


class FailedError(Exception):
    """The reduction cannot succeed in this epoch."""


class OpenReduction:
    """One attempt, made by :meth:`~spare_megatron.collectives.replica_communicators.ReplicaCommunicators.begin`."""

    def __init__(
        self,
        epoch: int,
        request: Reduction,
        stale: Callable[[], bool],
        find: Callable[[], Communicator | None],
        pool: BufferPool,
        changed: threading.Condition,
        bucket_bytes: int,
    ) -> None:
        """
        Args:
            stale: whether the epoch is over.
            find: returns the epoch's communicator, None before it is there; raises :class:`StaleError` when it is over.
            changed: guards the communicators' fields and ``pool``.
        """
        self.epoch = epoch
        self._request, self._stale, self._find = request, stale, find
        self._pool, self._changed = pool, changed
        self._tensors = request.tensors
        self._bucket_bytes = overlapped_bytes(request.tensors, bucket_bytes) if request.overlapped else bucket_bytes
        self._layout = self._layout_of(request.tensors, request.scalars)
        self._final = (0, 0)
        """(tensor, stop): all tensors before number ``tensor``, and its first ``stop`` elements, are final."""
        self._communicator: Communicator | None = None
        self._buffers: Buffers | None = None
        self._quiet_until_s = 0.0
        self._failed_s = 0.0
        self._lead = 0
        """The communicator's number of this attempt's first operation."""
        self._agreed = False
        self._encoded = self._sent = self._received = self._early = 0
        """Numbers of buckets."""
        self._sources: list[torch.Tensor | None] = []
        """Of each encoded bucket the accumulator that is summed as it is; None where the wire buffer holds a copy."""
        self._scalars: Mapping[str, float] | None = None if request.overlapped else request.scalars
        self._tail: Header | None = None
        self._sums: dict[str, float] | None = None
        self._over = ""
        """Why the attempt has ended; empty while it goes on. Text and no exception, whose traceback would keep the
        buffers."""
        self._is_stale = False

    def ready(self, tensor: int, stop: int) -> None:
        """Note that ``tensors[tensor][:stop]`` and all tensors before it are final, and send what can be sent. Never
        waits.

        Raises only what ``on_bucket`` raises: other failures are in the outcome of :meth:`finish`.
        """
        self._final = max(self._final, (tensor, stop))
        self.advance()

    def spoil(self, reason: str) -> None:
        """Fail this attempt, because something was called final that was not."""
        self._leave(FailedError(reason))

    def advance(self) -> None:
        """Do what can be done without waiting. Raises only what ``on_bucket`` raises."""
        if not self._over:
            self._try(self._advance)

    def finish(self, tensors: Sequence[torch.Tensor], scalars: Mapping[str, float]) -> ReduceOutcome:
        """Wait for the sums; everything is final now.

        ``tensors`` have the shapes of those with which the attempt began; buckets that were sent are not read again.
        Returns as soon as the sums are there or the epoch is over, and about VIEW_GRACE_S after a failure.
        """
        started_s = time.monotonic()
        self._early = self._received
        if not self._over:
            assert self._layout_of(tensors, self._request.scalars) == self._layout, "the tensors changed their layout"
            self._tensors, self._final = tensors, (len(tensors), 0)
            self._scalars = scalars
            self._try(self._wait_for_sums)
        communicator, ok = self._communicator, not self._over
        failed = not ok and not self._is_stale
        outcome = ReduceOutcome(
            ok=ok,
            stale=self._is_stale,
            tensors=self._buffers.results if ok and self._buffers is not None else (),
            scalars=self._sums or {} if ok else {},
            error=self._over if failed else "",
            links=communicator.links if failed and communicator else (),
            formation_s=communicator.formation_s if communicator and not self._is_stale else 0.0,
            reduce_s=time.monotonic() - started_s,
            early=self._early,
        )
        self._over = self._over or "finished"
        self._buffers, self._tensors, self._sources = None, (), []
        return outcome

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
        except _HookError as hook:
            self._leave(hook)
            raise hook.raised from None
        except Exception as error:
            self._leave(error)

    def _layout_of(self, tensors: Sequence[torch.Tensor], scalars: Mapping[str, float]) -> BucketLayout:
        known = {} if self._request.overlapped else scalars
        return BucketLayout.of(tensors, known, self._request.method, self._bucket_bytes)

    def _leave(self, error: Exception) -> None:
        """End the attempt with ``error``, and the epoch's communicator with it: this rank is no longer in step with the
        other members."""
        if not self._over:
            self._is_stale = isinstance(error, StaleError)
            self._over = str(error) or type(error).__name__
            self._buffers = None
        if self._communicator is not None:
            self._communicator.spoil(self._over)

    # --------------------------------------------------------------------------------------------- how it goes on

    def _wait_for_sums(self) -> None:
        while True:
            before = self._seen()
            self._advance()
            if self._received == len(self._layout.buckets) and self._sums is not None:
                return
            with self._changed:
                if self._seen() == before:
                    self._changed.wait(STALE_POLL_S)

    def _seen(self) -> tuple[object, ...]:
        """The state that this reduction waits for: when it changes, the reduction may go on."""
        with self._changed:
            communicator = self._communicator
            free = self._buffers is not None or self._pool.free(self._layout)
            if communicator is None:
                return (None, free)
            return (communicator.ready, communicator.done, communicator.error, communicator.given_up, free)

    def _advance(self) -> None:
        if self._stale():
            raise StaleError
        if self._communicator is None:
            self._communicator = self._find()
        communicator = self._communicator
        if communicator is None or not self._usable(communicator):
            return
        if self._buffers is None:
            self._buffers = self._begin(communicator)
        if self._buffers is None:
            return
        self._encode(self._buffers, communicator.reads_sources)
        if self._members_agree(communicator, self._buffers):
            self._send(communicator, self._buffers)
            self._receive(communicator, self._buffers)

    def _usable(self, communicator: Communicator) -> bool:
        with self._changed:
            if communicator.given_up:
                raise StaleError
            if communicator.error:
                self._failed_s = self._failed_s or time.monotonic()
                mute = any(link.mute for link in communicator.links)
                if time.monotonic() - self._failed_s > (MUTE_GRACE_S if mute else VIEW_GRACE_S):
                    raise FailedError(communicator.cause)
                return False
            return communicator.ready

    def _begin(self, communicator: Communicator) -> Buffers | None:
        """Take buffers and send the header; None while the buffers are in use.

        The header goes first and alone. When it is summed, all members have begun. Unless the reduction is overlapped,
        they have then computed everything, and silence is a failure."""
        self._quiet_until_s = self._quiet_until_s or time.monotonic() + QUIET_GRACE_S
        with self._changed:
            if not self._pool.free(self._layout) and time.monotonic() < self._quiet_until_s:
                return None
            buffers = self._pool.take(self._layout, communicator)
        buffers.header.write({} if self._request.overlapped else self._scalars or {})
        self._lead = communicator.submit(buffers.header.values, patient=True, settled=buffers.settled())
        return buffers

    def _encode(self, buffers: Buffers, reads_sources: bool) -> None:
        """Copy the buckets that are final into the wire buffers; where accumulators can be summed as they are, nothing
        is copied."""
        buckets = self._layout.buckets
        while self._encoded < len(buckets):
            bucket = buckets[self._encoded]
            if (bucket.tensor, bucket.stop) > self._final:
                return
            source, wire = self._tensors[bucket.tensor][bucket.start : bucket.stop], buffers.wire(bucket)
            method = self._request.method
            direct = reads_sources and source.device == wire.device and method.is_wire(source.dtype)
            if not direct:
                method.encode(source, wire)
            self._sources.append(source if direct else None)
            self._encoded += 1

    def _members_agree(self, communicator: Communicator, buffers: Buffers) -> bool:
        if self._agreed:
            return True
        if communicator.done < self._lead:
            return False
        sums = buffers.header.read(len(communicator.groups))
        if sums is None:
            raise FailedError(
                f"the groups {communicator.groups} do not reduce the same thing: tensors, scalars, reduction method or "
                "bucket size differ"
            )
        self._agreed = True
        self._sums = None if self._request.overlapped else sums
        return True

    def _send(self, communicator: Communicator, buffers: Buffers) -> None:
        """Submit the buckets that are encoded, and after the last one the scalars of an overlapped reduction, in which
        members may still compute between two buckets."""
        patient = self._request.overlapped
        settled = buffers.settled() if self._sent < self._encoded else None
        for bucket in self._layout.buckets[self._sent : self._encoded]:
            communicator.submit(buffers.wire(bucket), patient, settled, self._sources[self._sent])
            self._sent += 1
        last = self._sent == len(self._layout.buckets)
        if last and self._request.overlapped and self._scalars is not None and self._tail is None:
            self._tail = buffers.tail = Header.of(self._scalars, buffers.header.values)
            communicator.submit(self._tail.values, patient, buffers.settled())

    def _receive(self, communicator: Communicator, buffers: Buffers) -> None:
        buckets = self._layout.buckets
        while self._received < self._sent and communicator.done > self._lead + self._received:
            bucket = buckets[self._received]
            self._request.method.decode(buffers.wire(bucket), buffers.result(bucket))
            self._received += 1
            if self._request.on_bucket is not None:
                _call(self._request.on_bucket, self._received, len(buckets))
        if self._tail is not None and communicator.done > self._lead + len(buckets):
            self._sums = self._tail.read(len(communicator.groups))
            if self._sums is None:
                raise FailedError(f"the groups {communicator.groups} do not reduce the same scalars")


class _HookError(Exception):
    """``on_bucket`` raised an exception, which leaves the attempt as it is."""

    def __init__(self, raised: Exception) -> None:
        super().__init__(f"on_bucket raised {raised!r}")
        self.raised = raised


def _call(hook: Callable[[int, int], None], done: int, total: int) -> None:
    try:
        hook(done, total)
    except Exception as error:
        raise _HookError(error) from error
