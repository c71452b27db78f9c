"""What attempts to sum or to gather in one epoch have in common: how they find its communicator, wait, and end.

May assume: one thread at a time uses an attempt. Promises: errors of communication are values. An attempt that fails
first waits a moment for a newer view, which may explain the error, and then ends the communicator of its epoch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

import torch

from spare_megatron.collectives.communicator import Communicator
from spare_megatron.collectives.reduction import ReduceOutcome

STALE_POLL_S = 0.05
"""The interval at which ``stale`` is called while nothing else wakes the training thread."""
VIEW_GRACE_S = 0.2
"""How long a failed attempt waits for the view that explains the failure. A lost connection is most often the first
sign of a newer epoch: the member that learns of it first drops the old communicator (protocol rule 5), and the
coordinator learns of a death as soon as its neighbours do. A failed vote instead costs an epoch and blames somebody."""
SILENT_GRACE_S = 0.05
"""How long a failed attempt waits where a link is silent, which no view explains: until all members have informed each
other what they know of their links."""


class StaleError(Exception):
    """The epoch of this attempt is over."""

    def __init__(self) -> None:
        super().__init__("broken off when the epoch was over")


class FailedError(Exception):
    """The attempt cannot succeed in this epoch."""


class EpochAttempt:
    """One attempt. ``changed`` guards the communicators' fields."""

    def __init__(
        self,
        epoch: int,
        stale: Callable[[], bool],
        find: Callable[[], Communicator | None],
        changed: threading.Condition,
    ) -> None:
        """
        Args:
            stale: whether the epoch is over.
            find: returns the epoch's communicator, None before it is there; raises :class:`StaleError` when it is over.
        """
        self.epoch = epoch
        self._stale, self._find, self._changed = stale, find, changed
        self._communicator: Communicator | None = None
        self._failed_s = 0.0
        self._over = ""
        """Why the attempt has ended; empty while it goes on. Text and no exception, whose traceback would keep the
        buffers."""
        self._is_stale = False

    def _usable(self) -> Communicator | None:
        """The epoch's communicator; None before it can sum. Raises StaleError and FailedError."""
        if self._stale():
            raise StaleError
        if self._communicator is None:
            self._communicator = self._find()
        communicator = self._communicator
        if communicator is None:
            return None
        with self._changed:
            if communicator.given_up:
                raise StaleError
            if communicator.error:
                self._failed_s = self._failed_s or time.monotonic()
                silent = any(link.silent for link in communicator.links)
                if time.monotonic() - self._failed_s > (SILENT_GRACE_S if silent else VIEW_GRACE_S):
                    raise FailedError(communicator.cause)
                return None
            return communicator if communicator.ready else None

    def _wait_until(self, is_done: Callable[[], bool]) -> None:
        """Call ``is_done``, which does what can be done, whenever something has changed, until it returns True."""
        while True:
            before = self._seen()
            if is_done():
                return
            with self._changed:
                if self._seen() == before:
                    self._changed.wait(STALE_POLL_S)

    def _seen(self) -> tuple[object, ...]:
        """The state for which this attempt waits: when it changes, the attempt may go on."""
        communicator = self._communicator
        if communicator is None:
            return (None,)
        with self._changed:
            return (communicator.ready, communicator.done, communicator.error, communicator.given_up)

    def _leave(self, error: Exception) -> None:
        """End the attempt with ``error``, and the epoch's communicator with it: this rank is no longer in step with the
        other members."""
        if not self._over:
            self._is_stale = isinstance(error, StaleError)
            self._over = str(error) or type(error).__name__
        if self._communicator is not None:
            self._communicator.spoil(self._over)

    def _outcome(
        self, tensors: tuple[torch.Tensor, ...], scalars: Mapping[str, float], started_s: float, early: int = 0
    ) -> ReduceOutcome:
        """``tensors`` and ``scalars``: what there is where the attempt has not ended with an error."""
        communicator, ok = self._communicator, not self._over
        failed = not ok and not self._is_stale
        return ReduceOutcome(
            ok=ok,
            stale=self._is_stale,
            tensors=tensors if ok else (),
            scalars=scalars if ok else {},
            error=self._over if failed else "",
            links=communicator.links if failed and communicator else (),
            formation_s=communicator.formation_s if communicator and not self._is_stale else 0.0,
            reduce_s=time.monotonic() - started_s,
            early=early,
        )
