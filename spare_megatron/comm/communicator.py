"""One epoch of one rank position: a thread that owns a backend, so that nobody else can ever be blocked by
it.

The training thread submits buckets and waits on a condition; the control thread gives the communicator up by
setting a flag and cutting the backend's connections. Only the owner thread calls anything that can block. It
ends when the communicator was given up and no operation can touch a buffer any more; until then it keeps
every reference to the library's objects, because dropping one with an operation in flight blocks whoever
drops it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Collection
from typing import Any

import torch

from spare_megatron.comm.backend import Backend, BackendError


class Communicator:
    """States: forming -> ready -> given up or broken -> quiet -> dead. All fields are guarded by ``changed``."""

    def __init__(
        self, epoch: int, groups: tuple[int, ...], backend: Backend | None, changed: threading.Condition
    ) -> None:
        """``backend`` None: the only member; what it submits is its own sum."""
        self.epoch = epoch
        self.groups = groups
        self.ready = backend is None
        self.given_up = False
        self.error = ""
        self.blamed: tuple[int, ...] = ()
        self.done = 0
        """Operations completed, over the communicator's life."""
        self.submitted = 0
        self.quiet = backend is None
        """No operation can touch a buffer any more, and none will be started."""
        self.dead = backend is None
        """The owner has ended and freed everything."""
        self.formation_s = 0.0
        self.born_s = time.monotonic()
        self._backend = backend
        self._changed = changed
        self._queue: deque[tuple[torch.Tensor, bool]] = deque()
        self._in_flight: deque[Any] = deque()
        if backend is not None:
            threading.Thread(target=self._own, args=(backend,), name=f"replicas-e{epoch}", daemon=True).start()

    @property
    def busy(self) -> bool:
        """Some operation may still write into its buffer."""
        return not self.quiet and self.done != self.submitted

    @property
    def addresses(self) -> Collection[Any]:
        """Peer addresses that an older communicator must not touch."""
        return self._backend.addresses if self._backend is not None else ()

    def submit(self, wire: torch.Tensor, patient: bool = False) -> int:
        """Sum ``wire`` in place over the members, after everything submitted before. The operation is
        complete when ``done`` reaches the number returned."""
        with self._changed:
            self.submitted += 1
            if self._backend is None:
                self.done += 1
            else:
                self._queue.append((wire, patient))
                self._changed.notify_all()
            return self.submitted

    def spoil(self, reason: str) -> None:
        """This rank broke off in the middle: it is out of step with the other members for the rest of the epoch."""
        with self._changed:
            self.error = self.error or reason

    def give_up(self) -> None:
        """From now on nobody waits for it. Any thread; never blocks."""
        with self._changed:
            self.given_up = True
            self._changed.notify_all()
        if self._backend is not None:
            self._backend.cut()

    def unblock(self, foreign: Collection[Any]) -> None:
        """For the reaper: help the owner out of whatever :meth:`give_up` could not end at once."""
        if self._backend is not None:
            self._backend.cut()
            self._backend.unblock(foreign)

    def _own(self, backend: Backend) -> None:
        """After an error nothing can be reduced in this epoch any more, so the connections end at once, for the peers too."""
        try:
            backend.form()
            self._note_ready()
            self._serve(backend)
        except Exception as error:
            self._note_error(error)
        backend.cut()
        while self._in_flight:
            with contextlib.suppress(Exception):
                backend.wait(self._in_flight[0])
            self._in_flight.popleft()
        with self._changed:
            self.quiet = True
            self._queue.clear()
            self._changed.notify_all()
        with contextlib.suppress(Exception):
            backend.release()
        with self._changed:
            self.dead = True
            self._changed.notify_all()

    def _serve(self, backend: Backend) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self.given_up or self._queue or self._in_flight)
                if self.given_up:
                    return
                fresh = list(self._queue)
                self._queue.clear()
            for wire, patient in fresh:
                self._in_flight.append(backend.start(wire, patient))
            backend.wait(self._in_flight[0])
            self._in_flight.popleft()
            with self._changed:
                self.done += 1
                self._changed.notify_all()

    def _note_ready(self) -> None:
        with self._changed:
            self.ready = True
            self.formation_s = time.monotonic() - self.born_s
            self._changed.notify_all()

    def _note_error(self, error: Exception) -> None:
        blamed = error.blamed if isinstance(error, BackendError) else ()
        with self._changed:
            self.error = f"{error}" or type(error).__name__
            self.blamed = tuple(self.groups[rank] for rank in blamed)
            self._changed.notify_all()
