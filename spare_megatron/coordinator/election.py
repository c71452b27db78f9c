"""Decides which of several coordinators is in charge: one holds the lease, the others watch, and the next takes over.

A term is claimed by a file (:mod:`spare_megatron.coordinator.terms`), which its holder rewrites many times
in a lease. A candidate that has seen no change for a lease claims the next term. Taking over from a holder that lives
costs only a reconnect, so silence need not be proof of a death. But whichever process was stopped at whatever point,
and for however long, this must hold:

    A holder acts on a record only if the record is in the journal with which every later holder goes on.

L is the lease; a *look* reads the files of the terms. Assumed: a look that begins L/4 or more after a file was made
sees it, and data synced to a file are read by whoever opens it later. No clocks of different processes are compared:
each measures durations on its own.

1. *A holder is certain for half a lease.* It calls itself certain at time t if a look that began after t - L/2 saw no
   later term. If a later term was claimed at T, that look began before T + L/4; so t < T + 3/4 L.
2. *The next holder waits three quarters of a lease* after its claim, and then copies the journal. So while a holder is
   certain, no later one has begun to copy. (It does not wait where there was no term before, or it ended in order.)
3. *A final record is acted on only if the holder is certain after the record was synced*: then the copy has it. If the
   holder was not certain any more after it wrote a record, only a later holder that finds it in its copy acts on it.
   The holder also checks before it writes, but only to keep the journal free of such records.
4. *A candidate that was stopped between its claim and its copy* finds its term sealed when a later one has copied
   meanwhile. If it copies first, the later one copies its copy.

L is that of the holder, which its term names: a candidate with a shorter lease of its own goes by it, and takes it
over. So the L of a term is never shorter than that of a holder before it that may still be certain.

This holds even if the keep-alive thread hangs or a process is stopped at any point, because what counts is when a look
began, not when it returned. Members follow the highest fencing number (:mod:`spare_megatron.control_plane.leader`).
``tests/pure/test_lease_model.py`` goes through every order of these events.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from spare_megatron.coordinator.records import announce
from spare_megatron.coordinator.terms import SealedError, Term, Terms, UnseenError
from spare_megatron.runtime.run_directory import CoordinatorAddress, RunDirectory

BEATS_PER_LEASE = 10
STAGGER = 0.2
"""How much longer each further candidate waits, as a share of the lease, so that they do not all claim at once."""
CERTAIN = 0.5
"""How long after a look began the holder may rely on it, as a share of the lease."""
SEEN = 0.25
"""The time within which a new file becomes visible to the other processes, as a share of the lease."""
LOOKS = 20
"""Number of looks of a candidate in a lease; a holder that is not certain gives up after as many failed looks."""
VACANT_LOOKS = 3
"""How many looks in a row must find no term of this job attempt before its first term is claimed."""


class LeaseLostError(RuntimeError):
    """A later term has begun, or may have: this coordinator decides nothing any more."""


class Watch:
    """Tells a candidate what to do, from its looks at the newest term. Pure."""

    def __init__(self, index: int, lease_s: float, job_attempt: int, now_s: float) -> None:
        """``index`` is the number of the candidate, from 0."""
        self._delay_s, self._lease_s, self._job_attempt = index * STAGGER * lease_s, lease_s, job_attempt
        self._seen: Term | None = None
        self._since_s = self._looked_s = now_s
        self._vacant_looks = 0

    def look(self, newest: Term | None, now_s: float) -> str:
        """'wait', 'claim' (the next term) or 'over' (the job is). Not called after a look that failed."""
        if newest != self._seen:
            self._seen, self._since_s = newest, now_s
        if now_s - self._looked_s > self._lease_s * SEEN:
            self._since_s = now_s  # this process did not look, so it cannot say that the holder was silent
            self._vacant_looks = 0
        self._looked_s = now_s
        vacant = newest is None or newest.job_attempt < self._job_attempt
        self._vacant_looks = self._vacant_looks + 1 if vacant else 0
        if newest is not None and not vacant and newest.over is not None:
            return "over"
        if vacant and self._vacant_looks < VACANT_LOOKS:
            return "wait"
        lease_s = self._lease_s if newest is None else max(self._lease_s, newest.lease_s)
        patience_s = self._delay_s + (0.0 if vacant else lease_s)
        return "claim" if now_s - self._since_s >= patience_s else "wait"


class LeaseValidity:
    """Tells the holder of a term how long it may be certain that there is no later one. Pure."""

    def __init__(self, number: int, lease_s: float, known_s: float) -> None:
        """``known_s`` is a time before the claim, when there could be no later term."""
        self._number, self._lease_s, self.known_s = number, lease_s, known_s
        self.lost = ""
        """Why the lease is lost; empty while it is not."""

    def looked(self, began_s: float, newest: int) -> None:
        """A look that began at ``began_s`` found ``newest`` to be the newest term."""
        if newest > self._number:
            self.lose(f"coordinator {newest} has taken over from {self._number}")
        self.known_s = max(self.known_s, began_s)

    def lose(self, why: str) -> None:
        """The lease is lost; the first reason is kept."""
        self.lost = self.lost or why

    def certain(self, now_s: float) -> bool:
        """True while it is certain that no later holder has begun to copy the journal."""
        return not self.lost and now_s - self.known_s <= CERTAIN * self._lease_s


def wait_after_claim_s(term: Term, before: Term | None, lease_s: float) -> float:
    """How long the holder of a new term waits before it copies the journal."""
    ended = before is not None and before.number == term.number - 1 and before.over is not None
    return 0.0 if term.number == 1 or ended else (CERTAIN + SEEN) * lease_s


class LeadershipLease:
    """The lease of one process: it shows the others that the holder lives, and knows when it was replaced.
    Thread-safe."""

    def __init__(
        self,
        terms: Terms,
        term: Term,
        lease_s: float,
        known_s: float,
        clock: Callable[[], float] = time.monotonic,
        beat_s: float = 0.0,
    ) -> None:
        """``known_s`` is a time by ``clock`` before the claim; ``beat_s`` is the time between two signs of life, 0: a
        tenth of the lease."""
        self._terms, self._term, self._lease_s, self._clock = terms, term, lease_s, clock
        self._validity = LeaseValidity(term.number, lease_s, known_s)
        self._beat_s = beat_s or lease_s / BEATS_PER_LEASE
        self._lock = threading.Lock()
        """Guards ``_term``, its file, and the names in the run directory."""
        self._closed = threading.Event()
        self.run_dir: RunDirectory
        """The run directory with this term's own journal and metrics; set by :meth:`enter`."""
        self._thread = threading.Thread(target=self._keep, name="spare-lease", daemon=True)
        self._thread.start()

    @property
    def number(self) -> int:
        """The fencing number."""
        return self._term.number

    async def enter(self, before: Term | None) -> None:
        """Wait until the holder of the term ``before`` can make no record final any more, then take over its files.

        While the disk fails this is tried again, as long as this term is the latest. Raises LeaseLostError.
        """
        await asyncio.sleep(wait_after_claim_s(self._term, before, self._lease_s))
        reported = False
        while True:
            self.confirm()
            try:
                self.run_dir = await asyncio.to_thread(self._terms.open, self.number)
                return
            except SealedError as error:
                self._validity.lose(str(error))
            except OSError as error:
                if not reported:
                    announce(f"coordinator {self.number} cannot take over the journal yet: {error}")
                reported = True
            await asyncio.sleep(self._lease_s / LOOKS)

    def publish(self, address: CoordinatorAddress) -> None:
        """Let coordinator.json name this coordinator, until a later one serves. Raises LeaseLostError."""
        self.confirm()
        with self._lock:
            self._term = replace(self._term, address=address)
        with contextlib.suppress(OSError):  # the keep-alive thread tries it again
            self._renew()
        self.confirm()

    def confirm(self) -> None:
        """Return when it is certain that no later holder has begun to copy the journal.

        Raises:
            LeaseLostError: a later term has begun, or the terms could not be read for about a lease.
        """
        failure: OSError | None = None
        for _ in range(LOOKS):
            if self._validity.certain(self._clock()):
                return
            if self._validity.lost:
                break
            try:
                self._look()
            except OSError as error:
                failure = error
                time.sleep(self._lease_s / LOOKS)
        why = f"it cannot see whether a later one has begun ({failure})"
        self._validity.lose(f"coordinator {self.number} gives up its lease: {why}")
        raise LeaseLostError(self._validity.lost)

    def is_lost(self) -> bool:
        """True when this coordinator may decide nothing any more."""
        try:
            self.confirm()
        except LeaseLostError:
            return True
        return False

    async def until_lost(self) -> None:
        """Raises LeaseLostError when a later term begins; never returns."""
        while True:
            self.confirm()
            await asyncio.sleep(self._beat_s)

    def close(self, over: int | None = None) -> None:
        """Give up the lease. ``over`` is the job's exit code once it is over, with which the other candidates then
        leave as well; None: the job goes on."""
        self._closed.set()
        self._thread.join(self._lease_s)
        if over is None or self.is_lost():
            return
        until_s = self._clock() + self._lease_s
        while True:
            try:
                self._renew(over)
                return
            except OSError as error:
                if self._clock() > until_s:
                    announce(
                        f"coordinator {self.number} could not tell the other candidates that the job is over: {error}"
                    )
                    return
            time.sleep(self._beat_s)

    def _look(self) -> None:
        began_s = self._clock()
        newest = self._terms.newest()
        if newest is None:
            raise UnseenError(f"no term is seen, not even {self.number}")
        self._validity.looked(began_s, newest.number)

    def _keep(self) -> None:
        """Look and show signs of life in a thread of its own, because replaying a long journal takes longer than a
        lease."""
        while not self._closed.wait(self._beat_s) and not self._validity.lost:
            with contextlib.suppress(OSError):  # where the disk fails for a lease, others take over
                self._look()
                if not self._validity.lost:
                    self._renew()

    def _renew(self, over: int | None = None) -> None:
        with self._lock:
            self._term = replace(self._term, beat=self._term.beat + 1, over=over)
            self._terms.write(self._term)
            if self._term.address is not None:
                self._terms.show()


async def wait_for_lease(run_dir: RunDirectory, index: int, lease_s: float, job_attempt: int) -> LeadershipLease | int:
    """Watch until this candidate holds the lease or the job is over; returns the lease, or the job's exit code."""
    terms = Terms(run_dir)
    watch = Watch(index, lease_s, job_attempt, time.monotonic())
    while True:
        with contextlib.suppress(OSError):  # this look or claim failed; the next one may succeed
            newest = terms.newest()
            advice = watch.look(newest, time.monotonic())
            if advice == "over" and newest is not None and newest.over is not None:
                return newest.over
            known_s = time.monotonic()
            term = terms.claim(newest, job_attempt, lease_s) if advice == "claim" else None
            if term is not None:
                lease = LeadershipLease(terms, term, term.lease_s, known_s)
                try:
                    await lease.enter(newest)
                    return lease
                except LeaseLostError as error:
                    announce(f"{error}; it had not served yet")
                    lease.close()
        await asyncio.sleep(lease_s / LOOKS)
