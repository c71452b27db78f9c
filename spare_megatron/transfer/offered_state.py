"""Which offers a donor serves, and the buffers that it keeps for their learners. No sockets here."""

from __future__ import annotations

import enum
import threading
import time
from dataclasses import dataclass, field

from spare_megatron.collectives.handshake import Member
from spare_megatron.transfer.snapshot_shards import SendBuffer
from spare_megatron.transfer.transport import KeptSnapshotShards, SnapshotShard


class Missing(enum.Enum):
    """Why a buffer is not there."""

    LATER = enum.auto()
    """It may come: it has not been put, or this donor has not received the offer yet."""
    GONE = enum.auto()
    """It will not come (again)."""


@dataclass
class _OpenOffer:
    learner: Member
    part: int
    parts: int
    buffers: dict[int, SendBuffer] = field(default_factory=dict)
    """By step."""
    newest: int | None = None
    """The last step that was put."""
    given_bytes: int = 0
    wanted: int = 0
    """The highest step that the learner has asked for; it has all earlier ones."""


class OfferedState:
    """Keeps each buffer from its put until its learner asks for a later step. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        """Guards everything below, and is notified when something comes or goes."""
        self._offers: dict[int, _OpenOffer] = {}
        self._dropped: set[int] = set()
        self._closed = False

    def open(self, number: int, learner: Member, part: int, parts: int) -> None:
        """Begin an offer. Nothing happens where it is open already, or was dropped."""
        assert 0 <= part < parts, (part, parts)
        with self._changed:
            if number not in self._dropped and number not in self._offers and not self._closed:
                self._offers[number] = _OpenOffer(learner, part, parts)

    def put(self, number: int, step: int, snapshot_shard: SnapshotShard) -> None:
        """Copy this donor's part of ``snapshot_shard`` and keep it, unless the offer is not open when the copy is
        made."""
        with self._changed:
            offer = self._offers.get(number)
        if offer is None:
            return
        assert offer.newest in (None, step - 1), f"step {step} of offer {number} was put after step {offer.newest}"
        buffer = SendBuffer(snapshot_shard, offer.part, offer.parts)
        with self._changed:
            if self._offers.get(number) is offer:
                offer.newest = step
                if step >= offer.wanted:
                    offer.buffers[step] = buffer
                self._changed.notify_all()

    def kept(self, number: int) -> KeptSnapshotShards:
        """What an offer keeps; nothing where it is not open."""
        with self._changed:
            offer = self._offers.get(number)
            if offer is None:
                return KeptSnapshotShards({}, 0)
            return KeptSnapshotShards({step: one.size for step, one in offer.buffers.items()}, offer.given_bytes)

    def gave(self, number: int, size: int) -> None:
        """Count ``size`` bytes that the learner of an offer was sent."""
        with self._changed:
            offer = self._offers.get(number)
            if offer is not None:
                offer.given_bytes += size

    def drop(self, number: int) -> None:
        """End an offer, whether or not it was ever open."""
        with self._changed:
            self._dropped.add(number)
            self._free(self._offers.pop(number, None))
            self._changed.notify_all()

    def close(self) -> None:
        """End all offers."""
        with self._changed:
            self._closed = True
            for offer in self._offers.values():
                self._free(offer)
            self._offers.clear()
            self._changed.notify_all()

    def ask(self, number: int, who: Member, step: int, wait_s: float) -> SendBuffer | Missing:
        """The buffer of a step, for the learner of the offer; it frees those of earlier steps. Waits up to ``wait_s``
        before it says that it may come later."""
        deadline_s = time.monotonic() + wait_s
        with self._changed:
            while True:
                found = self._find(number, who, step)
                left_s = deadline_s - time.monotonic()
                if found is not Missing.LATER or left_s <= 0:
                    return found
                self._changed.wait(left_s)

    def _find(self, number: int, who: Member, step: int) -> SendBuffer | Missing:
        offer = self._offers.get(number)
        if offer is None:
            return Missing.GONE if self._closed or number in self._dropped else Missing.LATER
        if who != offer.learner:
            return Missing.GONE
        offer.wanted = max(offer.wanted, step)
        for earlier in [one for one in offer.buffers if one < offer.wanted]:
            offer.buffers.pop(earlier).freed = True
        if step in offer.buffers:
            return offer.buffers[step]
        was_there = step < offer.wanted or (offer.newest is not None and step <= offer.newest)
        return Missing.GONE if was_there else Missing.LATER

    @staticmethod
    def _free(offer: _OpenOffer | None) -> None:
        for buffer in offer.buffers.values() if offer is not None else ():
            buffer.freed = True
