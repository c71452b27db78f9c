"""The terms in a run directory, as files: which term is the newest, and which files belong to it.

* ``terms/N.json`` begins term N; N is the fencing number. It is made by a hard link, which fails where the name is
  taken, also on network file systems, so that only one claim succeeds. Only its holder rewrites it.
* ``terms/N/`` has the journal and the metrics to which only its holder appends; at first they are copies of those of
  the term before. (Finished parts of the journal and snapshots, which nobody changes, are further names of the same
  files.) The folder appears as a whole or never: a process that takes over from a term without a folder puts a
  file in its place (it *seals* the term), so that a candidate that was stopped before it opened this term cannot do it
  any more.
* ``coordinator.json``, ``journal.jsonl`` and ``metrics.jsonl`` in the run directory show the newest term that serves:
  its address, and hard links to its files. A coordinator reads the last two only where the one before it had no term;
  one without a term lets them show the last term first (:func:`show_last`), as its holder may have died before it did.

A process that was stopped after it had looked for later terms, and before it renamed, can let a name in the run
directory show an older term. That cannot be prevented, but it is repaired: after a rename a process looks again, and
shows the newer term if there is one by then; and the present holder checks the names ten times in a lease. So the names
are right once the last such rename is done and either its process or the holder has run on.

A look that cannot see what must be there (a listing that fails or is behind, a file that is gone between listing and
reading, half a file) raises :class:`UnseenError`: it says nothing about who holds the lease.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from spare_megatron.coordinator.journal_parts import copy_journal, link_parts
from spare_megatron.runtime import failpoints
from spare_megatron.runtime.run_directory import (
    CoordinatorAddress,
    RunDirectory,
    of_keys,
    scratch_of,
    to_keys,
    write_json,
)


class UnseenError(OSError):
    """The terms could not be read this time."""


class SealedError(Exception):
    """A later term has taken over before this one was opened."""


@dataclass(frozen=True)
class Term:
    """The content of the file of one term."""

    number: int
    job_attempt: int
    """The job attempt in which the term began; with that job attempt the term is over."""
    beat: int = 0
    """A counter that grows while the holder lives."""
    over: int | None = None
    """The job's exit code, once this job attempt is over."""
    address: CoordinatorAddress | None = None
    """Where the holder serves; None before it does."""
    lease_s: float = 0.0
    """The lease by which its holder goes, and who takes over from it; 0 in files of an earlier version."""


class Terms:
    """The terms of one run directory, as one process sees them."""

    def __init__(self, run_dir: RunDirectory) -> None:
        self._run_dir, self._folder = run_dir, run_dir.path / "terms"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._highest = 0
        """The highest term number seen so far. A listing without it is out of date, as term files are never removed."""

    def newest(self) -> Term | None:
        """The newest term; None before the first. Raises UnseenError."""
        return next(self._downwards(), None)

    def claim(self, before: Term | None, job_attempt: int, lease_s: float = 0.0) -> Term | None:
        """Begin the term after ``before``, the newest one seen; None where another candidate was faster. Its lease is
        not shorter than that of a holder which may still go on."""
        published = self._run_dir.coordinator()
        known = before.number if before else 0, published.fencing if published else 0, self._run_dir.accepted_by()
        number = 1 + max(known)
        longest_s = max(lease_s, before.lease_s if before is not None and before.over is None else 0.0)
        term, scratch = Term(number, job_attempt, lease_s=longest_s), scratch_of(self._folder / f"claim-{number}")
        write_json(scratch, to_keys(asdict(term)))
        try:
            failpoints.hit("term.claim")
            os.link(scratch, self._path(number))
            failpoints.hit("term.claimed")
        except FileExistsError:
            return None
        finally:
            scratch.unlink()
        self._highest = max(self._highest, number)
        return term

    def write(self, term: Term) -> None:
        """Rewrite the file of a term, which only its holder may do."""
        write_json(self._path(term.number), to_keys(asdict(term)))

    def open(self, number: int) -> RunDirectory:
        """Take over the files that the terms before ``number`` left. Returns the run directory with this term's own
        journal and metrics. Raises SealedError where a later term has done so first."""
        own = self._own(number)
        if not own.is_dir():
            source = self._left_before(number)
            failpoints.hit("term.copy")
            self._fill(own, source)
            self._remove_before(source)
        mine = RunDirectory(self._run_dir.path)
        mine.journal, mine.metrics = (own / name for name in self._appended)
        return mine

    def show(self) -> None:
        """Let the names in the run directory show the newest term that serves, and look again after each rename. Any
        process may call it at any time."""
        shown = 0
        while (serving := self.serving()) is not None:
            if serving.number == shown:
                return
            shown = serving.number
            assert serving.address is not None
            self._run_dir.publish_coordinator(serving.address)
            for name in self._appended:
                self._link(self._own(shown) / name, self._run_dir.path / name)

    def journal_of(self, number: int) -> Path:
        """The journal of a term that was opened."""
        return self._own(number) / self._run_dir.journal.name

    def serving(self) -> Term | None:
        """The newest term that serves, or did. Raises UnseenError."""
        return next((term for term in self._downwards() if term.address is not None), None)

    # ------------------------------------------------------------------------------------------------------------------

    @property
    def _appended(self) -> tuple[str, str]:
        return self._run_dir.journal.name, self._run_dir.metrics.name

    def _downwards(self) -> Iterator[Term]:
        """The terms, the newest first."""
        try:
            names = os.listdir(self._folder)
        except OSError as error:
            raise UnseenError(f"cannot list {self._folder}: {error.strerror}") from error
        numbers = [int(name[:-5]) for name in names if name.endswith(".json") and name[:-5].isdigit()]
        highest = max(numbers, default=0)
        if highest < self._highest:
            raise UnseenError(f"{self._folder} lists no term above {highest}, but there is {self._highest}")
        self._highest = highest
        for number in sorted(numbers, reverse=True):
            yield self._read(number)

    def _read(self, number: int) -> Term:
        path = self._path(number)
        try:
            failpoints.hit_file(path, "read")
            plain = of_keys(json.loads(path.read_text()))
            address = plain.pop("address")
            return Term(**plain, address=None if address is None else CoordinatorAddress(**address))
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UnseenError(f"cannot read {path}: {error}") from error

    def _left_before(self, number: int) -> Path:
        """The folder of the last term before ``number`` that was opened; terms after it that were not are sealed. The
        run directory itself where the coordinator before had no term, or there was none."""
        for earlier in range(number - 1, 0, -1):
            if not self._path(earlier).exists():
                break
            own = self._own(earlier)
            with contextlib.suppress(FileExistsError):
                os.close(os.open(own, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            if own.is_dir():
                return own
        return self._run_dir.path

    def _fill(self, own: Path, source: Path) -> None:
        """Make the folder ``own`` with durable copies of the files in ``source``."""
        scratch = scratch_of(own)
        scratch.mkdir()
        try:
            for name in self._appended:
                if source == self._run_dir.path and not (source / name).exists():
                    (scratch / name).touch()  # no coordinator ran before this one
                elif name == self._run_dir.journal.name:
                    copy_journal(source / name, scratch)
                else:
                    shutil.copyfile(source / name, scratch / name)
                with (scratch / name).open("rb") as file:
                    os.fsync(file.fileno())
            failpoints.hit("term.open")
            os.rename(scratch, own)
        except (NotADirectoryError, FileExistsError):
            raise SealedError(f"coordinator {own.name} cannot begin any more: a later one has") from None
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _remove_before(self, source: Path) -> None:
        """Remove the folders of terms older than the one that was copied, as nobody copies them any more."""
        older = [p for p in self._folder.iterdir() if p.name.isdigit() and source.name.isdigit()]
        for path in older:
            if int(path.name) < int(source.name) and path.is_dir():
                shutil.rmtree(path, ignore_errors=True)

    def _link(self, own: Path, name: Path) -> None:
        if name.exists() and name.samefile(own):
            return
        if name == self._run_dir.journal:
            link_parts(own, name)
        scratch = scratch_of(name)
        scratch.unlink(missing_ok=True)
        os.link(own, scratch)
        failpoints.hit("term.show")
        scratch.replace(name)

    def _path(self, number: int) -> Path:
        return self._folder / f"{number}.json"

    def _own(self, number: int) -> Path:
        return self._folder / str(number)


def show_last(run_dir: RunDirectory) -> None:
    """Let the names in the run directory show the last term, unless a coordinator without a term came after it. Only
    for the only coordinator of a run directory, before it reads them. Raises OSError."""
    if not (run_dir.path / "terms").is_dir():
        return
    terms = Terms(run_dir)
    last, published = terms.serving(), run_dir.coordinator_for_sure()
    if last is not None and (published is None or published.fencing <= last.number):
        terms.show()
        link_parts(terms.journal_of(last.number), run_dir.journal)
