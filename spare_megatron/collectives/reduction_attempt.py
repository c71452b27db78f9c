"""One attempt to reduce a step's gradients in one epoch, from the first bucket that is final to the outcome.

The order of a communicator's operations is fixed: a header with the layout's digest; the buckets of the tensors in
their order; if the reduction may overlap the computing of the tensors (:attr:`Reduction.overlapped`), a second header
with the scalars; and if sums are converted, the check vector. So members need not agree on when a bucket leaves, nor on
whether they overlap at all: one may send buckets from the middle of its backward pass to another that has long
finished.

May assume: :meth:`OpenReduction.ready` and :meth:`OpenReduction.spoil` are called by the training thread or by one that
it waits for (autograd's). Promises: accumulators are never written; only :meth:`OpenReduction.finish` waits; calls for
an epoch that is over do nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from spare_megatron.collectives.attempt import EpochAttempt, FailedError
from spare_megatron.collectives.buckets import WINDOW, BucketLayout, BufferPool, Buffers, Header, overlapped_bytes
from spare_megatron.collectives.communicator import Communicator
from spare_megatron.collectives.converting import ConvertedBucket
from spare_megatron.collectives.reduction import ReduceOutcome, Reduction

QUIET_GRACE_S = 0.2
"""How long an attempt waits for the buffers of an operation that was given up, which are most often free within
milliseconds, before it makes a second set."""


class OpenReduction(EpochAttempt):
    """One attempt, made by :meth:`~spare_megatron.collectives.replica_communicators.ReplicaCommunicators.begin`."""

    def __init__(
        self,
        epoch: int,
        request: Reduction,
        stale: Callable[[], bool],
        find: Callable[[], Communicator | None],
        *,
        pool: BufferPool,
        changed: threading.Condition,
        bucket_bytes: int,
    ) -> None:
        """
        Args:
            stale, find: see :class:`EpochAttempt`.
            changed: guards the communicators' fields and ``pool``.
        """
        super().__init__(epoch, stale, find, changed)
        self._request, self._pool = request, pool
        self._tensors = request.tensors
        self._bucket_bytes = overlapped_bytes(request.tensors, bucket_bytes) if request.overlapped else bucket_bytes
        self._layout = self._layout_of(request.tensors, request.scalars)
        self._final = (0, 0)
        """(tensor, stop): all tensors before number ``tensor``, and its first ``stop`` elements, are final."""
        self._buffers: Buffers | None = None
        self._quiet_until_s = 0.0
        self._lead = 0
        """The communicator's number of this attempt's first operation."""
        self._agreed = False
        self._encoded = self._sent = self._received = self._early = 0
        """Numbers of buckets."""
        self._sources: list[torch.Tensor | None] = []
        """Of each encoded bucket the accumulator that is summed as it is; None where the wire buffer holds a copy."""
        self._tally = None if request.conversion is None else request.conversion.begin()
        self._check_vector = 0
        """The communicator's number of the check vector; 0 before that is sent."""
        self._scalars: Mapping[str, float] | None = None if request.overlapped else request.scalars
        self._tail: Header | None = None
        self._sums: dict[str, float] | None = None

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
        outcome = self._outcome(self._results(), self._sums or {}, started_s, self._early)
        self._over = self._over or "finished"
        self._buffers, self._tensors, self._sources, self._tally = None, (), [], None
        return outcome

    def _results(self) -> tuple[torch.Tensor, ...]:
        if self._buffers is None:
            return ()
        return self._buffers.results if self._tally is None else (*self._buffers.results, self._buffers.check_vector)

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
        return BucketLayout.of(tensors, known, self._request.method, self._bucket_bytes, self._request.conversion)

    def _leave(self, error: Exception) -> None:
        if not self._over:
            self._buffers = None
        super()._leave(error)

    # --------------------------------------------------------------------------------------------- how it goes on

    def _wait_for_sums(self) -> None:
        self._wait_until(self._is_done)

    def _is_done(self) -> bool:
        self._advance()
        return self._has_everything()

    def _has_everything(self) -> bool:
        communicator = self._communicator
        if self._received < len(self._layout.buckets) or self._sums is None or communicator is None:
            return False
        return self._tally is None or (0 < self._check_vector <= communicator.done)

    def _seen(self) -> tuple[object, ...]:
        with self._changed:
            return (self._buffers is not None or self._pool.free(self._layout), *super()._seen())

    def _advance(self) -> None:
        communicator = self._usable()
        if communicator is None:
            return
        if self._buffers is None:
            self._buffers = self._begin(communicator)
        if self._buffers is None:
            return
        while True:
            before = self._received
            self._encode(self._buffers, communicator)
            if self._members_agree(communicator, self._buffers):
                self._send(communicator, self._buffers)
                self._receive(communicator, self._buffers)
                self._reduce_check_vector(communicator, self._buffers)
            if self._received == before:  # else there is room for others
                return

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
        self._lead = communicator.submit(buffers.header.values, wait_for_peers=True, ready_fence=buffers.ready_fence())
        return buffers

    def _encode(self, buffers: Buffers, communicator: Communicator) -> None:
        """Copy the buckets that are final, and for which there is room, into the wire buffers; accumulators that can be
        summed as they are, are not copied. If such a sum is converted too, its wire buffer is only working memory."""
        buckets = self._layout.buckets
        kept = not (communicator.alone or _owners_convert(communicator, buffers))
        while self._encoded < len(buckets):
            bucket, converted = buckets[self._encoded], self._layout.is_converted(self._encoded)
            if (bucket.tensor, bucket.stop) > self._final:
                return
            source, wire = self._tensors[bucket.tensor][bucket.start : bucket.stop], buffers.wire(self._encoded)
            method = self._request.method
            reads = communicator.reads_sources or (converted and communicator.alone)
            direct = reads and source.device == wire.device and method.is_wire(source.dtype)
            if converted and (kept or not direct) and self._encoded >= self._received + WINDOW:
                return
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
        wait_for_peers = self._request.overlapped
        ready_fence = buffers.ready_fence() if self._sent < self._encoded else None
        while self._sent < self._encoded:
            number = self._sent
            converted = self._by_owners(number, communicator, buffers)
            communicator.submit(buffers.wire(number), wait_for_peers, ready_fence, self._sources[number], converted)
            self._sent += 1
        last = self._sent == len(self._layout.buckets)
        if last and self._request.overlapped and self._scalars is not None and self._tail is None:
            self._tail = buffers.tail = Header.of(self._scalars, buffers.header.values.device)
            communicator.submit(self._tail.values, wait_for_peers, buffers.ready_fence())

    def _receive(self, communicator: Communicator, buffers: Buffers) -> None:
        buckets = self._layout.buckets
        while self._received < self._sent and communicator.done > self._lead + self._received:
            number = self._received
            if not self._layout.is_converted(number):
                self._request.method.decode(buffers.wire(number), buffers.result(number))
            elif self._by_owners(number, communicator, buffers) is None:
                self._convert(number, communicator, buffers)
            self._received += 1
            if self._request.on_bucket is not None:
                _call(self._request.on_bucket, self._received, len(buckets))
        if self._tail is not None and communicator.done > self._lead + len(buckets):
            self._sums = self._tail.read(len(communicator.groups))
            if self._sums is None:
                raise FailedError(f"the groups {communicator.groups} do not reduce the same scalars")

    def _by_owners(self, number: int, communicator: Communicator, buffers: Buffers) -> ConvertedBucket | None:
        """The conversion of a bucket by the owners of its chunks, during the sum. None if it is not converted, or only
        afterwards, in this class."""
        if self._tally is None or not self._layout.is_converted(number):
            return None
        if not _owners_convert(communicator, buffers):
            return None
        bucket = self._layout.buckets[number]
        return ConvertedBucket(self._tally, bucket.tensor, bucket.start, buffers.result(number))

    def _convert(self, number: int, communicator: Communicator, buffers: Buffers) -> None:
        """Convert the sum of a whole bucket. This member owns the chunk that has its rank."""
        assert self._tally is not None, "there is a rule by which it is converted"
        bucket, result, source = self._layout.buckets[number], buffers.result(number), self._sources[number]
        own = source if communicator.alone else None
        sums = buffers.wire(number).to(result.device, non_blocking=True) if own is None else own
        chunk = -(-result.numel() // len(communicator.groups))
        first = min(communicator.rank * chunk, result.numel())
        last = min(first + chunk, result.numel())
        for start, stop, owned in ((0, first, False), (first, last, True), (last, result.numel(), False)):
            part = slice(start, stop)
            if start < stop:
                self._tally.convert(bucket.tensor, bucket.start + start, sums[part], None, result[part], owned)

    def _reduce_check_vector(self, communicator: Communicator, buffers: Buffers) -> None:
        """Send what this member reports of the sums, when it has all of them. It waits for the others' training
        threads. The control plane detects whether these still run: silence is no error."""
        if self._tally is None or self._check_vector or self._received < len(self._layout.buckets):
            return
        if self._request.overlapped and self._tail is None:
            return
        buffers.check_vector.copy_(self._tally.check_vector())
        self._check_vector = communicator.submit(
            buffers.check_vector, wait_for_peers=True, ready_fence=buffers.ready_fence()
        )


def _owners_convert(communicator: Communicator, buffers: Buffers) -> bool:
    """Whether sums are converted while they are made, by the owners of their chunks."""
    return communicator.converts and not buffers.staged


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
