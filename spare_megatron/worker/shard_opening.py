"""Opens the data of shards that the group of this rank has adopted, in a thread of its own, so that the training thread
does not wait for it.

Promises: shards are opened in the order in which views name them, each is tried again after short pauses, because a
store may be away for a moment, and the leader learns how each went; whatever opening raises is an answer,
never the end of the rank.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from spare_megatron.control_plane.session import Session
from spare_megatron.protocol.member import Orders

log = logging.getLogger(__name__)

PAUSES_S = (1.0, 4.0)
"""How long a shard that could not be opened is left alone before it is tried again."""

Opens = Callable[[int, int], None]
"""``opens(shard, step)`` makes the data of a shard readable that the group did not host, from ``step`` on; it raises
where they cannot be read."""


class ShardOpening:
    """The thread. ``look`` is for the control thread, the other methods are for the training thread."""

    def __init__(self, opens: Opens) -> None:
        self._opens = opens
        self._wanted: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
        self._seen: set[int] = set()
        self._session: Session | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shards", daemon=True)

    def look(self, orders: Orders) -> None:
        """Note which shards the newest view has, and open those that are new, once :meth:`begin` was called."""
        for shard, _ in orders.view.adopts:
            if shard not in self._seen:
                self._seen.add(shard)
                self._wanted.put((shard, orders.view.step))

    def begin(self, session: Session) -> None:
        """Open shards from now on, and tell the leader by ``session``."""
        self._session = session
        self._thread.start()

    def close(self) -> None:
        """Open no further shard. One that is being opened is not waited for: a command or a disk may hang."""
        self._closing.set()
        self._wanted.put(None)

    def _run(self) -> None:
        assert self._session is not None
        while (wanted := self._wanted.get()) is not None:
            self._session.opened(wanted[0], self._try(*wanted))

    def _try(self, shard: int, step: int) -> str:
        """Why a shard cannot be opened; empty where it is open."""
        problem = ""
        for pause_s in (*PAUSES_S, 0.0):
            try:
                self._opens(shard, step)
            except Exception as error:
                problem = f"{type(error).__name__}: {error}".splitlines()[0]
                log.warning("shard %d cannot be opened: %s", shard, problem)
                if self._closing.wait(pause_s):
                    break
            else:
                log.info("shard %d is open", shard)
                return ""
        return problem
