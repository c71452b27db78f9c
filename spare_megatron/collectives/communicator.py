"""The replica communicator of one epoch: a thread owns its backend, so that no other thread is blocked by it.

The training thread submits buckets and waits on a condition; the control thread gives the communicator up by setting a
flag and cutting the backend's connections. Only the owner thread calls what can block. The owner thread starts when
something is first submitted, or earlier if the backend needs it to connect. It ends when the communicator was given up
or has failed; after that, nothing touches a buffer any more.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from operator import itemgetter
from typing import NamedTuple

import torch

from spare_megatron.collectives.backend import Backend, BackendError
from spare_megatron.collectives.converting import ConvertedBucket
from spare_megatron.collectives.handshake import Member
from spare_megatron.collectives.ring import Shares
from spare_megatron.protocol.messages import Link
from spare_megatron.runtime.wakeups import ask_for_short_waits

log = logging.getLogger(__name__)


class _Submitted(NamedTuple):
    """One operation that was submitted."""

    wire: torch.Tensor
    wait_for_peers: bool
    ready_fence: Callable[[], None] | None
    source: torch.Tensor | None
    converted: ConvertedBucket | None
    shares: Shares | None


class Communicator:
    """One epoch's communicator. It is forming, then ready, then given up or failed, then dead. ``changed`` guards all
    fields."""

    def __init__(
        self, epoch: int, members: tuple[Member, ...], rank: int, backend: Backend | None, changed: threading.Condition
    ) -> None:
        """``rank`` is this member's index. ``backend`` is None for the only member of an epoch: what it submits is its
        own sum."""
        self.epoch, self.rank = epoch, rank
        self._members = members
        self.ready = backend is None
        self.given_up = False
        self.error = ""
        self.submitted = self.done = 0
        """Numbers of operations over the communicator's lifetime."""
        self.dead = backend is None
        """The owner has ended and freed everything."""
        self._halted = backend is None
        """Nothing touches a buffer any more."""
        self.formation_s = 0.0
        self._born_s = time.monotonic()
        self._backend = backend
        self._unmet: tuple[Link, ...] = ()
        """The links that the error itself names, in ranks."""
        self._changed = changed
        self._queue: deque[_Submitted] = deque()
        self._owner: threading.Thread | None = None
        if backend is not None and backend.forms_alone:
            backend.begin(self._look)
        elif backend is not None:
            self._start(backend)

    @cached_property
    def groups(self) -> tuple[int, ...]:
        """The groups of the members; a group's rank is its index here."""
        return tuple(map(itemgetter(0), self._members))

    @property
    def reads_sources(self) -> bool:
        """Whether :meth:`submit` takes a ``source``."""
        return self._backend is not None and self._backend.reads_sources

    @property
    def alone(self) -> bool:
        """Whether the epoch has no other member: what is submitted is not looked at."""
        return self._backend is None

    @property
    def converts(self) -> bool:
        """Whether :meth:`submit` takes what a sum is ``converted`` into."""
        return self._backend is not None and self._backend.converts

    @property
    def busy(self) -> bool:
        """Whether some operation may still write into its buffer."""
        return not self._halted and self.done != self.submitted

    @property
    def cause(self) -> str:
        """Why nothing can be summed any more, as far as is known by now."""
        known = self._backend.over if self._backend is not None else ""
        return known or self.error

    @property
    def links(self) -> tuple[Link, ...]:
        """What did not arrive, between which groups, as far as this member knows by now."""
        known = {(link.sender, link.receiver): link for link in self._unmet}
        if self._backend is not None:
            known |= {(link.sender, link.receiver): link for link in self._backend.evidence}
        if not known:
            return ()
        return tuple(
            replace(link, sender=self.groups[link.sender], receiver=self.groups[link.receiver])
            for _, link in sorted(known.items())
        )

    @property
    def gone(self) -> bool:
        """Whether no thread, connection or buffer of it is left."""
        return self.dead and not (self._owner is not None and self._owner.is_alive())

    def submit(
        self,
        wire: torch.Tensor,
        wait_for_peers: bool = False,
        ready_fence: Callable[[], None] | None = None,
        source: torch.Tensor | None = None,
        converted: ConvertedBucket | None = None,
        *,
        shares: Shares | None = None,
    ) -> int:
        """Queue the sum of ``wire`` over the members, in place, behind everything submitted before.

        Args:
            wait_for_peers: wait for members that still compute.
            ready_fence: called before the sum; returns when ``wire`` is written.
            source: what this member adds instead of ``wire``; it is only read, until the communicator is cut.
            converted: what the sum is turned into; ``wire`` is then room for the work, and holds no sum afterwards.
            shares: ``wire`` is gathered, not summed.

        Returns:
            The operation's number: it is complete when ``done`` reaches it.
        """
        with self._changed:
            self.submitted += 1
            if self._backend is None:
                self.done += 1
            elif not (self.dead or self._halted):
                self._queue.append(_Submitted(wire, wait_for_peers, ready_fence, source, converted, shares))
                if self._owner is None:
                    self._start(self._backend)
                self._changed.notify_all()
            return self.submitted

    def spoil(self, reason: str) -> None:
        """Fail this epoch's communicator, because this rank stopped in the middle of a reduction: the other members
        must not wait for it. From any thread; never blocks."""
        with self._changed:
            self.error = self.error or reason
            backend = self._backend
        if backend is not None and not self.dead:
            backend.cut(reason)

    def give_up(self, replaced: bool = False) -> None:
        """End the communicator with its epoch: whoever waits for it wakes. From any thread; never blocks.

        ``replaced``: the backend of a newer epoch, which forms alone, begins next, and cuts this one's."""
        with self._changed:
            backend = None if self.dead else self._backend
            unowned = self._owner is None
            self.given_up, self.dead = True, self.dead or unowned
            self._halted = self._halted or unowned
            self._changed.notify_all()
        if backend is None or (replaced and backend.forms_alone):
            return
        backend.cut("given up when the epoch was over")
        if unowned:
            backend.release()

    def join(self, until_s: float) -> None:
        """Wait for its thread to end after :meth:`give_up`, but no longer than until ``until_s`` (monotonic)."""
        if self._owner is not None:
            self._owner.join(max(0.0, until_s - time.monotonic()))

    def _start(self, backend: Backend) -> None:
        self._owner = threading.Thread(target=self._own, args=(backend,), name=f"replicas-e{self.epoch}", daemon=True)
        self._owner.start()

    def _look(self) -> None:
        """See whether the backend, which forms alone, has formed or failed to."""
        backend = self._backend
        assert backend is not None
        if backend.formed and not self.ready:
            self._note_ready()
        elif backend.over and not self.ready and not self.given_up:
            self._note_error(BackendError(backend.over))

    def _own(self, backend: Backend) -> None:
        """Run the owner thread: form, then sum what is submitted, until an error or :meth:`give_up`.

        An error ends the connections at once, for the peers too, and then what is in flight, so that its buffers are
        free; what the peers know about the cause still arrives for ``linger_s``."""
        ask_for_short_waits()
        try:
            if not backend.forms_alone:
                backend.form()
                self._note_ready()
            self._serve(backend)
        except Exception as error:
            self._note_error(error)
        backend.cut(self.error or "given up")
        try:
            backend.halt()
            self._note_halted()
        except Exception:  # its buffers stay taken
            log.exception("the sums of epoch %d could not be ended", self.epoch)
        with self._changed:
            self._changed.wait_for(lambda: self.given_up, backend.linger_s)
        with contextlib.suppress(Exception):
            backend.release()
        with self._changed:
            self.dead = True
            self._queue.clear()
            self._changed.notify_all()

    def _serve(self, backend: Backend) -> None:
        begun = 0
        while True:
            with self._changed:
                if not begun:
                    self._changed.wait_for(lambda: self.given_up or self._queue)
                if self.given_up:
                    return
                one = self._queue.popleft() if self._queue and begun < backend.in_flight else None
            if one is not None:
                if one.ready_fence is not None:
                    one.ready_fence()
                backend.begin_sum(one.wire, one.wait_for_peers, one.source, one.converted, one.shares)
                begun += 1
            if backend.end_sum(self._is_queued if begun < backend.in_flight else _never):
                begun -= 1
                with self._changed:
                    self.done += 1
                    self._changed.notify_all()

    def _is_queued(self) -> bool:
        """Whether something waits to be begun."""
        return bool(self._queue)

    def _note_ready(self) -> None:
        with self._changed:
            self.ready = True
            self.formation_s = time.monotonic() - self._born_s
            self._changed.notify_all()

    def _note_halted(self) -> None:
        with self._changed:
            self._halted = True
            self._queue.clear()
            self._changed.notify_all()

    def _note_error(self, error: Exception) -> None:
        with self._changed:
            self.error = self.error or f"{error}" or type(error).__name__
            self._unmet = error.links if isinstance(error, BackendError) else ()
            self._changed.notify_all()


def _never() -> bool:
    return False
