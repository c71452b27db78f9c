"""What an engine calls while it runs: the types that the seam (:mod:`spare_megatron.trainer.engine`) and the engine of
Megatron share, though neither may import the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

PieceHook = Callable[[str, int], None]
"""('forward', n) when this rank starts the n-th piece of a run, ('backward', n) when it is done with it: once for each
piece, also where a pipeline stage has several chunks (a piece enters and leaves it through the first). ('audit', n) at
the same two moments of the n-th audited piece; ('evaluate', n) after the n-th batch of an evaluation."""


class Outlet(Protocol):
    """Where accumulators leave while a run still computes. Called by the thread that computes."""

    def ready(self, tensor: int, stop: int) -> None:
        """Elements of tensor number ``tensor`` before ``stop``, and all tensors before it, are final for this run."""

    def spoil(self, reason: str) -> None:
        """Something that was told to be final was added to: nothing that has left may be used."""
