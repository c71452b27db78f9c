"""The interface through which a rank sends or receives state.

The unit is a *snapshot shard*: the state after a step, or the reduced result of a later step, of one rank position.
In an offer by d donors, donor i gives part i of d of the bytes of each snapshot shard, and the snapshot shards are
numbered by their steps: the first is the state, each later one is the result of its step (docs/protocol.md, rule 17).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from spare_megatron.collectives.handshake import Member


@dataclass(frozen=True)
class SnapshotShard:
    """What one rank position needs of one step."""

    tensors: Mapping[str, torch.Tensor]
    """Name -> contiguous tensor, of any dtype and device. The names and shapes are the same on all donors."""
    values: Mapping[str, Any]
    """JSON values; floats travel exactly."""


@dataclass(frozen=True)
class KeptSnapshotShards:
    """What a donor's rank keeps of an offer, because the learner's rank has not asked for a later snapshot shard
    yet."""

    sizes: Mapping[int, int]
    """Step -> bytes of its part."""
    given_bytes: int
    """What it has given to the learner of this offer so far."""


class FetchError(Exception):
    """A snapshot shard cannot be had from a donor: it was damaged twice, or nothing comes any more. The sentence names
    the donor."""


class GoneError(FetchError):
    """A donor serves the offer no longer."""


class FetchOverError(Exception):
    """The caller gave a fetch up."""


@dataclass(frozen=True)
class Source:
    """One donor of an offer, as its learner's rank sees it."""

    member: Member
    address: str
    """Where the donor's rank of this position serves its snapshot shards."""


class StateTransport(Protocol):
    """Moves the snapshot shards of one rank; as a donor of any number of offers, and as a learner of one.
    Thread-safe."""

    @property
    def address(self) -> str:
        """Where learners reach this rank; it is sent in the rank's Hello."""

    def open(self, number: int, learner: Member, part: int, parts: int) -> None:
        """Serve part ``part`` of ``parts`` of the snapshot shards of offer ``number`` to ``learner``. Nothing is there
        yet. An offer that was dropped stays so."""

    def put(self, number: int, step: int, snapshot_shard: SnapshotShard) -> None:
        """Copy this rank's part of ``snapshot_shard`` and serve it. The steps of an offer follow each other without a
        gap. Returns when the copy is made. Does nothing where the offer is not open (any more)."""

    def kept(self, number: int) -> KeptSnapshotShards:
        """What is kept of an offer; nothing where it is not open."""

    def drop(self, number: int) -> None:
        """Free all of an offer. Later requests for it are answered with GONE."""

    def fetch(
        self,
        number: int,
        step: int,
        sources: Sequence[Source],
        place: Callable[[SnapshotShard], Mapping[str, torch.Tensor]],
        over: Callable[[], bool],
    ) -> SnapshotShard:
        """Wait for the snapshot shard of ``step`` of offer ``number`` and take its parts from all ``sources`` at once:
        part i from source i. The sources free what they keep of earlier steps. One fetch goes on at a time.

        Args:
            place: is called once, with tensors on the meta device and the values of the header; returns the
                contiguous tensors to fill, of the same names, shapes and dtypes. What it raises ends the fetch.
            over: asked several times a second; true when nobody wants the snapshot shard any more.

        Returns:
            The snapshot shard, with the filled tensors.

        Raises:
            FetchError: it cannot be had; the tensors may be filled in part. GoneError where a donor has dropped it.
            FetchOverError: ``over()`` was true; likewise.
        """

    def close(self) -> None:
        """Give up everything; a fetch under way ends with FetchOverError."""
