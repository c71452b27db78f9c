"""Snapshot shards over TCP: the transport of one rank, which is a donor of some offers, or the learner of one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

import torch

from spare_megatron.collectives.handshake import Identity, Member
from spare_megatron.transfer.authenticated_listener import AuthenticatedListener
from spare_megatron.transfer.fetch_client import StateFetchClient
from spare_megatron.transfer.fetching import LOOK_S, fetch_snapshot_shard
from spare_megatron.transfer.offered_state import OfferedState
from spare_megatron.transfer.serving import Serving
from spare_megatron.transfer.transport import FetchOverError, KeptSnapshotShards, SnapshotShard, Source, StateTransport


class SocketTransport(StateTransport):
    """Implements StateTransport. Only ``put``, ``fetch`` and ``close`` ever wait."""

    def __init__(self, me: Identity, host: str, timeout_s: float, rate_bytes_s: float = 0) -> None:
        """Listen at ``host``. Raises OSError where this machine does not have that address.

        Args:
            timeout_s: how long a donor may give nothing, and a learner take nothing.
            rate_bytes_s: the most that this rank gives a second, to all learners together; 0 for no limit.
        """
        self._me, self._timeout_s = me, timeout_s
        self._offered = OfferedState()
        self._serving = Serving(self._offered, timeout_s, rate_bytes_s)
        self._door = AuthenticatedListener(me, host, self._serving.welcome)
        self._closing = threading.Event()
        self._fetching = threading.Lock()
        """Held by the one fetch that goes on; guards what is below."""
        self._offer: tuple[int, tuple[Source, ...]] | None = None
        self._clients: list[StateFetchClient] = []
        """Their connections stay open from snapshot shard to snapshot shard of one offer."""

    @property
    def address(self) -> str:
        return self._door.address

    def open(self, number: int, learner: Member, part: int, parts: int) -> None:
        self._offered.open(number, learner, part, parts)

    def put(self, number: int, step: int, snapshot_shard: SnapshotShard) -> None:
        self._offered.put(number, step, snapshot_shard)

    def kept(self, number: int) -> KeptSnapshotShards:
        return self._offered.kept(number)

    def drop(self, number: int) -> None:
        self._offered.drop(number)

    def fetch(
        self,
        number: int,
        step: int,
        sources: Sequence[Source],
        place: Callable[[SnapshotShard], Mapping[str, torch.Tensor]],
        over: Callable[[], bool],
    ) -> SnapshotShard:
        def ends() -> bool:
            return self._closing.is_set() or over()

        while not self._fetching.acquire(timeout=LOOK_S):
            if ends():
                raise FetchOverError("nobody wants the snapshot shard any more")
        try:
            if self._offer != (number, tuple(sources)):
                self._part()
                self._offer = number, tuple(sources)
                self._clients = [StateFetchClient(self._me, number, one, self._timeout_s) for one in sources]
            try:
                return fetch_snapshot_shard(self._clients, step, place, ends)
            except BaseException:
                self._part()
                raise
        finally:
            self._fetching.release()

    def close(self) -> None:
        if self._closing.is_set():
            return
        self._closing.set()
        self._door.close()
        self._offered.close()
        self._serving.close()
        with self._fetching:
            self._part()

    def _part(self) -> None:
        """Hang up on all donors."""
        for client in self._clients:
            client.close()
        self._offer, self._clients = None, []
