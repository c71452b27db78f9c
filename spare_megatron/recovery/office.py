"""Which of several coordinators decides: one holds office at a time, the others watch, the next takes over.

A term of office is a file ``terms/NUMBER.json`` in the run directory; its number is the fencing number. Making the
file is the claim (a hard link, which fails where the name is taken, on network file systems too). Whoever holds office
rewrites it many times in a lease. A candidate that has seen no change for a lease claims the next number. Therefore:

* before a coordinator makes anything final it must know, for less than half a lease, that no later term exists;
* a new one waits half a lease after its claim, then puts a copy in the journal's place: the old one, should it be
  stopped between its look and its writing, writes into a file that nobody reads;
* members follow the highest fencing number (:mod:`spare_megatron.comm.leader`).

Taking over from one that lives costs a reconnect and nothing else, so silence need not be proof of a death. May
assume: a file that one host made is seen by the others within a quarter of a lease. No clocks are compared: each
process measures on its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from spare_megatron.comm.rundir import RunDirectory, read_json, write_json

BEATS_PER_LEASE = 10
STAGGER = 0.2
"""Of a lease: how much longer each further candidate waits, so that they do not all claim at once."""


class OfficeLostError(RuntimeError):
    """A later term has begun: this coordinator decides nothing any more."""


@dataclass(frozen=True)
class Term:
    """What the file of one term says."""

    number: int
    life: int
    """Of the job: a term of an earlier life ended with it, however it ended."""
    beat: int = 0
    """Grows while the holder lives."""
    over: int | None = None
    """The job's exit code, once this life is over."""


class Terms:
    """The files of the terms in one run directory."""

    def __init__(self, run_dir: RunDirectory) -> None:
        self._run_dir, self._folder = run_dir, run_dir.path / "terms"
        self._folder.mkdir(parents=True, exist_ok=True)

    def newest(self) -> Term | None:
        """The present term; None before the first."""
        number = max((int(path.stem) for path in self._folder.glob("*.json")), default=0)
        plain = read_json(self._path(number)) if number else None
        return None if plain is None else Term(**plain)

    def claim(self, life: int) -> Term | None:
        """Begin the next term; None where another candidate was faster."""
        newest, published = self.newest(), self._run_dir.coordinator()
        number = 1 + max(newest.number if newest else 0, published.fencing if published else 0)
        term, scratch = Term(number, life), self._folder / f".claim-{number}-{os.getpid()}-{os.uname().nodename}"
        write_json(scratch, asdict(term))
        try:
            os.link(scratch, self._path(number))
        except FileExistsError:
            return None
        finally:
            scratch.unlink()
        return term

    def write(self, term: Term) -> None:
        """What its holder says of its own term."""
        write_json(self._path(term.number), asdict(term))

    def _path(self, number: int) -> Path:
        return self._folder / f"{number}.json"


class Watch:
    """Pure: from looks at the newest term to what a candidate is to do."""

    def __init__(self, index: int, lease_s: float, life: int, now_s: float) -> None:
        """``index`` orders the candidates, the first is 0."""
        self._delay_s, self._lease_s, self._life = index * STAGGER * lease_s, lease_s, life
        self._seen: Term | None = None
        self._since_s = self._looked_s = now_s

    def look(self, newest: Term | None, now_s: float) -> str:
        """'wait', 'claim' the next term, or 'over': the job is."""
        if newest != self._seen:
            self._seen, self._since_s = newest, now_s
        if now_s - self._looked_s > self._lease_s / 4:
            self._since_s = now_s  # this process did not look: silence in that time is nobody's
        self._looked_s = now_s
        vacant = newest is None or newest.life < self._life
        if not vacant and newest is not None and newest.over is not None:
            return "over"
        patience_s = self._delay_s + (0.0 if vacant else self._lease_s)
        return "claim" if now_s - self._since_s >= patience_s else "wait"


class Office:
    """Held by one process: says that it lives, and knows when it has been replaced. Thread-safe."""

    def __init__(self, terms: Terms, term: Term, lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._terms, self._term, self._lease_s, self._clock = terms, term, lease_s, clock
        self._lock = threading.Lock()
        self._lost, self._closed = threading.Event(), threading.Event()
        self._known_s = clock()
        self._thread = threading.Thread(target=self._keep, name="spare-office", daemon=True)
        self._thread.start()

    @property
    def number(self) -> int:
        """The fencing number."""
        return self._term.number

    def confirm(self) -> None:
        """Before anything final: raises OfficeLostError unless no later term was there within half a lease."""
        if self._lost.is_set() or self._clock() - self._known_s > self._lease_s / 2:
            self._look()

    async def until_lost(self) -> None:
        """Raises OfficeLostError when a later term begins; never returns."""
        while not self._lost.is_set():
            await asyncio.sleep(self._lease_s / BEATS_PER_LEASE)
        self._look()

    def close(self, over: int | None = None) -> None:
        """Leave office; ``over``: with the job's exit code, for the other candidates and for who started them."""
        self._closed.set()
        self._thread.join()
        if over is not None and not self._lost.is_set():
            self._terms.write(replace(self._term, over=over))

    def _look(self) -> None:
        now_s = self._clock()
        newest = self._terms.newest()
        if newest is not None and newest.number > self.number:
            self._lost.set()
            raise OfficeLostError(f"coordinator {newest.number} has taken over from {self.number}")
        with self._lock:
            self._known_s = max(self._known_s, now_s)

    def _keep(self) -> None:
        """A thread of its own: replaying a long journal takes longer than a lease."""
        while not self._closed.wait(self._lease_s / BEATS_PER_LEASE):
            try:
                self._look()
                self._term = replace(self._term, beat=self._term.beat + 1)
                self._terms.write(self._term)
            except OfficeLostError:
                return
            except OSError:
                continue  # a file system that fails for a while: others take over if it fails for a lease


async def wait_for_office(run_dir: RunDirectory, index: int, lease_s: float, life: int) -> Office | int:
    """Watch until this candidate holds office, or until the job is over: its exit code then."""
    terms = Terms(run_dir)
    watch = Watch(index, lease_s, life, time.monotonic())
    while True:
        newest = terms.newest()
        advice = watch.look(newest, time.monotonic())
        if advice == "over" and newest is not None and newest.over is not None:
            return newest.over
        term = terms.claim(life) if advice == "claim" else None
        if term is None:
            await asyncio.sleep(lease_s / BEATS_PER_LEASE / 2)
            continue
        office = Office(terms, term, lease_s)
        if newest is not None and newest.over is None:
            await asyncio.sleep(lease_s / 2)  # until the one before it may not make anything final any more
        replace_by_copy(run_dir.journal, term.number)
        return office


def replace_by_copy(path: Path, number: int) -> None:
    """The same content in another file: whoever has the old one open writes for nobody."""
    with contextlib.suppress(FileNotFoundError):
        copy = path.with_name(f".{path.name}.{number}")
        shutil.copyfile(path, copy)
        with copy.open("rb") as file:
            os.fsync(file.fileno())
        copy.replace(path)
