"""The types of what an engine calls while it runs. The interface :mod:`spare_megatron.worker.engine` and Megatron's
engine share them, though neither may import the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

PieceHook = Callable[[str, int], None]
"""Called with ('forward', n) when this rank starts the n-th piece of a run and with ('backward', n) when it is done
with it; n counts all pieces of the run that are added, also those without samples. Each is reported once, even if a
pipeline stage has several chunks (a piece enters and leaves the stage through the first). It is called with ('audit',
n) at these two moments of the n-th audited piece, and with ('evaluate', n) after the n-th batch of an evaluation."""


class Outlet(Protocol):
    """Takes accumulators while a run still computes. Called in the thread that computes."""

    def ready(self, tensor: int, stop: int) -> None:
        """Elements of tensor number ``tensor`` before ``stop``, and all tensors before it, are final for this run."""

    def spoil(self, reason: str) -> None:
        """Something was added to elements that were said to be final: none of what was taken in this run may be
        used."""
