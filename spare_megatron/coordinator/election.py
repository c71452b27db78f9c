"""Which of several coordinators decides: one holds office at a time, the others watch, the next takes over.

A term of office is claimed as a file (:mod:`spare_megatron.coordinator.terms`), which its holder rewrites many times
in a lease. A candidate that has seen no change for a lease claims the next one. Taking over from one that lives costs
a reconnect and nothing else, so silence need not be proof of a death. What must hold instead, whatever was stopped
for however long at whatever point:

    No record is acted on by a holder unless it is in the journal that every later holder goes on with.

L is the lease. Assumed: a look that begins L/4 or more after a file was made sees it, and what was synced to a file is
read by whoever opens it later. No clocks are compared: each process measures durations on its own.

1. *A holder is certain for half a lease.* It calls itself certain at time t if a look that began after t - L/2 saw no
   later term. If a later term was claimed at T, that look began before T + L/4; so t < T + 3/4 L.
2. *The next holder waits three quarters of a lease* after its claim, and then copies the journal. So whenever one is
   certain, no later one has begun to copy. (Not where the term before ended in order, or there was none.)
3. *A final record is acted on only if the holder is certain after the record was synced*: then the copy has it. A
   record that was written, but not followed by certainty, is acted on by nobody but whoever finds it in the copy. That
   the holder asks before it writes, too, only keeps the journal short.
4. *A candidate that was stopped between its claim and its copy* finds its term sealed when a later one has copied
   meanwhile; and one that copies first and is then overtaken has its copy copied.

Neither a keep-alive thread that hangs nor a process that is stopped anywhere matters to this: what counts is when the
look began, not when it came back. Members follow the highest fencing number (:mod:`spare_megatron.control.leader`).
``tests/pure/test_office_model.py`` goes through every order of these events.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from spare_megatron.control.run_directory import CoordinatorAddress, RunDirectory
from spare_megatron.coordinator.records import say
from spare_megatron.coordinator.terms import SealedError, Term, Terms, UnseenError

BEATS_PER_LEASE = 10
STAGGER = 0.2
"""Of a lease: how much longer each further candidate waits, so that they do not all claim at once."""
CERTAIN = 0.5
"""Of a lease: how long after the begin of a look its holder may rely on it."""
SEEN = 0.25
"""Of a lease: when at the latest a file that was made is seen by the others."""
LOOKS = 20
"""In a lease, by candidates; and as often in a row a holder that is not certain tries to look before it gives up."""
VACANT_LOOKS = 3
"""Looks in a row that must find no term of this life before the first one is claimed."""


class OfficeLostError(RuntimeError):
    """A later term has begun, or may have: this coordinator decides nothing any more."""


class Watch:
    """Pure: from looks at the newest term to what a candidate is to do."""

    def __init__(self, index: int, lease_s: float, life: int, now_s: float) -> None:
        """``index`` orders the candidates, the first is 0."""
        self._delay_s, self._lease_s, self._life = index * STAGGER * lease_s, lease_s, life
        self._seen: Term | None = None
        self._since_s = self._looked_s = now_s
        self._vacant_looks = 0

    def look(self, newest: Term | None, now_s: float) -> str:
        """'wait', 'claim' the next term, or 'over': the job is. A look that saw nothing is not told here."""
        if newest != self._seen:
            self._seen, self._since_s = newest, now_s
        if now_s - self._looked_s > self._lease_s * SEEN:
            self._since_s = now_s  # this process did not look: silence in that time is nobody's
            self._vacant_looks = 0
        self._looked_s = now_s
        vacant = newest is None or newest.life < self._life
        self._vacant_looks = self._vacant_looks + 1 if vacant else 0
        if newest is not None and not vacant and newest.over is not None:
            return "over"
        if vacant and self._vacant_looks < VACANT_LOOKS:
            return "wait"
        patience_s = self._delay_s + (0.0 if vacant else self._lease_s)
        return "claim" if now_s - self._since_s >= patience_s else "wait"


class Tenure:
    """Pure: how long the holder of a term may be certain that there is no later one."""

    def __init__(self, number: int, lease_s: float, known_s: float) -> None:
        """``known_s``: a time before the claim, when there could be no later term."""
        self._number, self._lease_s, self.known_s = number, lease_s, known_s
        self.lost = ""
        """By what, once it is."""

    def looked(self, began_s: float, newest: int) -> None:
        """A look that began at ``began_s`` found this number to be the newest."""
        if newest > self._number:
            self.lose(f"coordinator {newest} has taken over from {self._number}")
        self.known_s = max(self.known_s, began_s)

    def lose(self, why: str) -> None:
        """It is over; the first reason counts."""
        self.lost = self.lost or why

    def certain(self, now_s: float) -> bool:
        """True while this is the latest term, or the next one still waits."""
        return not self.lost and now_s - self.known_s <= CERTAIN * self._lease_s


def wait_after_claim_s(term: Term, before: Term | None, lease_s: float) -> float:
    """How long the holder of a new term waits before it copies the journal."""
    ended = before is not None and before.number == term.number - 1 and before.over is not None
    return 0.0 if term.number == 1 or ended else (CERTAIN + SEEN) * lease_s


class Office:
    """Held by one process: says that it lives, and knows when it has been replaced. Thread-safe."""

    def __init__(
        self,
        terms: Terms,
        term: Term,
        lease_s: float,
        known_s: float,
        clock: Callable[[], float] = time.monotonic,
        beat_s: float = 0.0,
    ) -> None:
        """``known_s``: of ``clock``, before the claim. ``beat_s``: between two signs of life, 0 for ten in a lease."""
        self._terms, self._term, self._lease_s, self._clock = terms, term, lease_s, clock
        self._tenure = Tenure(term.number, lease_s, known_s)
        self._beat_s = beat_s or lease_s / BEATS_PER_LEASE
        self._lock = threading.Lock()
        """Guards ``_term``, its file, and the names in the run directory."""
        self._closed = threading.Event()
        self.run_dir: RunDirectory
        """Once entered: with this term's own journal and metrics."""
        self._thread = threading.Thread(target=self._keep, name="spare-office", daemon=True)
        self._thread.start()

    @property
    def number(self) -> int:
        """The fencing number."""
        return self._term.number

    async def enter(self, before: Term | None) -> None:
        """Wait until the holder of the term ``before`` makes nothing final any more, then take over what it left.

        A disk that fails is tried again, as long as this term is the latest. Raises OfficeLostError.
        """
        await asyncio.sleep(wait_after_claim_s(self._term, before, self._lease_s))
        said = False
        while True:
            self.confirm()
            try:
                self.run_dir = await asyncio.to_thread(self._terms.open, self.number)
                return
            except SealedError as error:
                self._tenure.lose(str(error))
            except OSError as error:
                if not said:
                    say(f"coordinator {self.number} cannot take over the journal yet: {error}")
                said = True
            await asyncio.sleep(self._lease_s / LOOKS)

    def publish(self, address: CoordinatorAddress) -> None:
        """This one serves from now on: coordinator.json names it, until a later one serves. Raises OfficeLostError."""
        self.confirm()
        with self._lock:
            self._term = replace(self._term, address=address)
        with contextlib.suppress(OSError):  # the keep-alive thread does it again
            self._say_alive()
        self.confirm()

    def confirm(self) -> None:
        """Returns when it is certain that no later holder has begun to copy the journal.

        Raises:
            OfficeLostError: a later term has begun, or nothing can be seen of the terms for about a lease.
        """
        failure: OSError | None = None
        for _ in range(LOOKS):
            if self._tenure.certain(self._clock()):
                return
            if self._tenure.lost:
                break
            try:
                self._look()
            except OSError as error:
                failure = error
                time.sleep(self._lease_s / LOOKS)
        self._tenure.lose(f"coordinator {self.number} gives up its office: it cannot look for later ones ({failure})")
        raise OfficeLostError(self._tenure.lost)

    def is_lost(self) -> bool:
        """True when this one decides nothing any more."""
        try:
            self.confirm()
        except OfficeLostError:
            return True
        return False

    async def until_lost(self) -> None:
        """Raises OfficeLostError when a later term begins; never returns."""
        while True:
            self.confirm()
            await asyncio.sleep(self._beat_s)

    def close(self, over: int | None = None) -> None:
        """Leave office; ``over``: with the job's exit code, for the other candidates and for who started them."""
        self._closed.set()
        self._thread.join(self._lease_s)
        if over is None or self.is_lost():
            return
        until_s = self._clock() + self._lease_s
        while True:
            try:
                self._say_alive(over)
                return
            except OSError as error:
                if self._clock() > until_s:
                    say(f"coordinator {self.number} could not leave its last word for the others: {error}")
                    return
            time.sleep(self._beat_s)

    def _look(self) -> None:
        began_s = self._clock()
        newest = self._terms.newest()
        if newest is None:
            raise UnseenError(f"no term is seen, not even {self.number}")
        self._tenure.looked(began_s, newest.number)

    def _keep(self) -> None:
        """A thread of its own: replaying a long journal takes longer than a lease."""
        while not self._closed.wait(self._beat_s) and not self._tenure.lost:
            with contextlib.suppress(OSError):  # one that fails for a while: others take over if it fails for a lease
                self._look()
                if not self._tenure.lost:
                    self._say_alive()

    def _say_alive(self, over: int | None = None) -> None:
        with self._lock:
            self._term = replace(self._term, beat=self._term.beat + 1, over=over)
            self._terms.write(self._term)
            if self._term.address is not None:
                self._terms.show()


async def wait_for_office(run_dir: RunDirectory, index: int, lease_s: float, life: int) -> Office | int:
    """Watch until this candidate holds office, or until the job is over: its exit code then."""
    terms = Terms(run_dir)
    watch = Watch(index, lease_s, life, time.monotonic())
    while True:
        with contextlib.suppress(OSError):  # neither a look nor a claim: the next one may be
            newest = terms.newest()
            advice = watch.look(newest, time.monotonic())
            if advice == "over" and newest is not None and newest.over is not None:
                return newest.over
            known_s = time.monotonic()
            term = terms.claim(newest, life) if advice == "claim" else None
            if term is not None:
                office = Office(terms, term, lease_s, known_s)
                try:
                    await office.enter(newest)
                    return office
                except OfficeLostError as error:
                    say(f"{error}, before it served")
                    office.close()
        await asyncio.sleep(lease_s / LOOKS)
