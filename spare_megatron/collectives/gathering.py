"""Gathers over the groups of an epoch: each member gives its share of some tensors, and the others get it. No bit is
added to another one, and each travels once.

The order of a communicator's operations is that of reductions: a header with a digest of the shares and the scalars,
which waits for members that are not there yet, then the tensors one after the other.

Promises: a gather ends when it is complete, failed or its epoch is over, whichever is first. A tensor of one that was
not complete may still be written to: it is not used again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from spare_megatron.collectives.attempt import EpochAttempt, FailedError
from spare_megatron.collectives.buckets import Header, ready_fence
from spare_megatron.collectives.communicator import Communicator
from spare_megatron.collectives.reduction import ReduceOutcome
from spare_megatron.collectives.ring import Shares


@dataclass(frozen=True)
class Gathering:
    """One request."""

    tensors: Sequence[torch.Tensor]
    """Flat and contiguous, of the same sizes on every member, with this member's shares in place. The others' are
    written into them."""
    shares: Sequence[Shares]
    """Of each tensor."""
    scalars: Mapping[str, float] = field(default_factory=dict)
    """Summed over the members, with the same keys on each."""


class OpenGathering(EpochAttempt):
    """One attempt."""

    def __init__(
        self,
        epoch: int,
        request: Gathering,
        stale: Callable[[], bool],
        find: Callable[[], Communicator | None],
        *,
        changed: threading.Condition,
        device: torch.device,
    ) -> None:
        """``device``: where the tensors travel; those of another device are copied there and back."""
        super().__init__(epoch, stale, find, changed)
        for tensor, shares in zip(request.tensors, request.shares, strict=True):
            size = sum(shares.numels)
            assert tensor.numel() == size, f"a tensor of {tensor.numel()} elements, of which {size} are given"
        self._request, self._device = request, device
        self._wires: list[torch.Tensor] = []
        self._header: Header | None = None
        self._agreed = 0
        """The communicator's number of the header."""
        self._last = 0
        """And that of the last tensor; 0 before it is sent."""
        self._sums: dict[str, float] = {}

    def finish(self) -> ReduceOutcome:
        """Wait for what the others give. Returns as soon as it is there or the epoch is over, and about VIEW_GRACE_S
        after a failure."""
        started_s = time.monotonic()
        try:
            self._wait_until(self._is_done)
            for tensor, wire in zip(self._request.tensors, self._wires, strict=True):
                if wire is not tensor:
                    tensor.copy_(wire)
        except Exception as error:
            self._leave(error)
        return self._outcome(tuple(self._request.tensors), self._sums, started_s)

    def _is_done(self) -> bool:
        communicator = self._usable()
        if communicator is None:
            return False
        if self._header is None:
            about = tuple(
                (one.dtype, shares) for one, shares in zip(self._request.tensors, self._request.shares, strict=True)
            )
            self._header = Header.of(self._request.scalars, self._device, about)
            self._agreed = communicator.submit(
                self._header.values, wait_for_peers=True, ready_fence=ready_fence([self._header.values])
            )
        if communicator.done < self._agreed:
            return False
        if not self._last:
            self._send(communicator, self._header)
        return communicator.done >= self._last

    def _send(self, communicator: Communicator, header: Header) -> None:
        sums = header.read(len(communicator.groups))
        if sums is None:
            raise FailedError(f"the groups {communicator.groups} do not gather the same thing: sizes or givers differ")
        self._sums, self._last = sums, self._agreed
        self._wires = [one if one.device == self._device else one.to(self._device) for one in self._request.tensors]
        fence = ready_fence(self._wires)
        for wire, shares in zip(self._wires, self._request.shares, strict=True):
            if wire.numel():
                self._last = communicator.submit(wire, ready_fence=fence, shares=shares)
