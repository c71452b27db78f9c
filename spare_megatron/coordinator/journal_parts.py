"""The files of a journal: parts that follow each other, and the lines in them.

``journal.jsonl`` is the part to which the coordinator appends. When it is long a new one takes its name, and it becomes
``journal-000001.jsonl``, later ``journal-000001.jsonl.gz``: a *finished* part, which nobody changes any more. Each part
begins with a header::

    {"format": 2, "part": 3, "first": 164042, "crc32_before": 2774519105}

the number of its first record, and the checksum of all bytes of the part before. So a part that is missing, or of
another journal, is noticed.

What must hold, whatever is killed or stopped between two file operations:

1. ``journal.jsonl`` is there as soon as one record was written, and names its own number k: it is a part as a whole,
   under one name or the next. (It gets its second name by a hard link, then the new part gets the first by a rename.)
2. A finished part ends with a final record, which was on the disk and confirmed. So it is the beginning of the journal
   of every later holder of the office, however late its files appear.
3. A finished part that a reader needs is there, plain or compressed; where both are, the plain one counts.
4. Files with the number of the present part or a higher one are left-overs, and are not read.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from spare_megatron import failpoints
from spare_megatron.config.errors import ConfigError
from spare_megatron.control.run_directory import scratch_of, sync_directory
from spare_megatron.coordinator.appended_file import AppendedFile

FORMAT = 2
"""Grows with every change after which this code would read older journals or snapshots wrongly. Journals without a
header are format 1."""
COMPRESSION = 6
CHUNK_BYTES = 1 << 20
LOOKS = 5
"""A finished part may be compressed while a reader looks for it: so often both of its names are tried."""


class JournalError(ValueError):
    """A journal that no coordinator can have written, or whose replay decides something else."""


class Place(NamedTuple):
    """A place in a journal, behind a whole line."""

    part: int = 1
    bytes: int = 0
    """Length of the part up to here, before any compression."""
    crc32: int = 0
    """Checksum of these bytes."""
    records: int = 0
    """Number of records in the whole journal up to here."""

    def after(self, lines: bytes, records: int = 1) -> Place:
        """The place behind ``lines``, which have so many records."""
        return Place(self.part, self.bytes + len(lines), zlib.crc32(lines, self.crc32), self.records + records)


BEGIN = Place()


def header_after(place: Place) -> bytes:
    """The header of the part that begins at ``place``: of the next one, or, at the beginning, of the first."""
    part = place.part + 1 if place.bytes else place.part
    plain = {"format": FORMAT, "part": part, "first": place.records + 1, "crc32_before": place.crc32}
    return json.dumps(plain, separators=(",", ":")).encode() + b"\n"


def snapshot_path(path: Path, part: int) -> Path:
    """The newest snapshot that was taken in a part of the journal ``path``."""
    return path.with_name(f"snapshot-{part:06d}.json")


def plain_path(path: Path, part: int) -> Path:
    """A finished part before it is compressed."""
    return path.with_name(f"{path.stem}-{part:06d}.jsonl")


def packed_path(path: Path, part: int) -> Path:
    """A finished part, compressed."""
    return path.with_name(f"{path.stem}-{part:06d}.jsonl.gz")


def beside(path: Path) -> Iterator[tuple[int, Path]]:
    """(number, file) of every finished part and snapshot in the folder of the journal ``path``."""
    form = re.compile(rf"(?:{re.escape(path.stem)}-(\d+)\.jsonl(?:\.gz)?|snapshot-(\d+)\.json)")
    for name in sorted(os.listdir(path.parent)):
        found = form.fullmatch(name)
        if found is not None:
            yield int(found[1] or found[2]), path.with_name(name)


# ----------------------------------------------------------------------------------------------------------- reading


class JournalLines:
    """Reads the records' lines of all parts from a place on: (place before, line, place behind) of each. A torn last
    line is dropped. Reading raises:

    * JournalError: a part is missing, damaged or of another journal;
    * ConfigError: the journal has another format.
    """

    def __init__(self, path: Path, start: Place = BEGIN) -> None:
        self._path, self._start = path, start
        self.end = start
        """The place up to which lines or headers were read."""

    def __iter__(self) -> Iterator[tuple[Place, bytes, Place]]:
        with contextlib.ExitStack() as files:
            # Opened first: a coordinator that begins a new part meanwhile does not change this file any more.
            present = _open_present(files, self._path)
            if present is None:
                return
            last = _part_of(self._path, present)
            if self._start.part > last:
                raise JournalError(f"{self._path} is part {last}, the place to go on from is in {self._start.part}")
            for part in range(self._start.part, last + 1):
                name, file = (self._path, present) if part == last else _open_finished(self._path, part)
                with contextlib.closing(file), _damage_named(name):
                    yield from self._lines_of(name, file, part, torn=part == last)

    def _lines_of(self, name: Path, file: IO[bytes], part: int, torn: bool) -> Iterator[tuple[Place, bytes, Place]]:
        at = self.end
        if at.part == part and at.bytes:
            _skip(name, file, at)
        else:
            at = self.end = _behind_header(name, file, at)
        for line in file:
            if not line.endswith(b"\n"):
                if not torn:
                    raise JournalError(f"{name} ends in the middle of a line: it is not whole")
                return
            before, at = at, at.after(line)
            self.end = at
            yield before, line, at


def _open_present(files: contextlib.ExitStack, path: Path) -> IO[bytes] | None:
    """The part to which the coordinator appends; None where nothing is written yet."""
    try:
        file: IO[bytes] = files.enter_context(path.open("rb"))
        if file.readline().endswith(b"\n"):
            file.seek(0)
            return file
    except FileNotFoundError:
        pass
    left = [name for _, name in beside(path)] if path.parent.is_dir() else []
    if left:
        raise JournalError(f"{path} is not there or empty, but there is {left[-1].name}, which is of the same journal")
    return None


def _part_of(path: Path, file: IO[bytes]) -> int:
    """The number of a part, which is at its beginning before and after."""
    line = file.readline()
    file.seek(0)
    return int(_header(path, line)["part"])


def _behind_header(name: Path, file: IO[bytes], at: Place) -> Place:
    """The place behind the header of the part that begins at ``at``."""
    line, expected = file.readline(), header_after(at)
    header = _header(name, line)
    if header != json.loads(expected):
        raise JournalError(f"{name} does not follow the part before it: its header is {header}, not {expected!r}")
    return Place(header["part"], len(line), zlib.crc32(line), at.records)


def _skip(name: Path, file: IO[bytes], at: Place) -> None:
    """Read up to a place, whose bytes must be the same as when it was noted."""
    left, crc32 = at.bytes, 0
    while left:
        chunk = file.read(min(left, CHUNK_BYTES))
        if not chunk:
            break
        left, crc32 = left - len(chunk), zlib.crc32(chunk, crc32)
    if left or crc32 != at.crc32:
        raise JournalError(f"the first {at.bytes} bytes of {name} are not those of record {at.records} and before")


def _header(name: Path, line: bytes) -> dict[str, Any]:
    """The header in the first line of a part. Raises ConfigError where the journal has another format."""
    try:
        plain: dict[str, Any] = json.loads(line)
        found = plain.get("format", 1 if "n" in plain else None)
    except (ValueError, AttributeError):
        found = None
    if found is None:
        raise JournalError(f"{name} line 1 is no header of a journal")
    if found != FORMAT:
        raise ConfigError(
            f"{name} has journal format {found}, and this version of spare_megatron reads and writes format {FORMAT}: "
            "go on with the version that wrote it, or give the job another run directory and --load its checkpoint"
        )
    return plain


def _open_finished(path: Path, part: int) -> tuple[Path, IO[bytes]]:
    for _ in range(LOOKS):
        for name in (plain_path(path, part), packed_path(path, part)):
            with contextlib.suppress(FileNotFoundError):
                return name, name.open("rb") if name.suffix == ".jsonl" else _unpacked(name)
    raise JournalError(f"part {part} of {path} is missing: there is no {packed_path(path, part).name} beside it")


def _unpacked(name: Path) -> IO[bytes]:
    file: IO[bytes] = io.BufferedReader(gzip.GzipFile(name), CHUNK_BYTES)  # type: ignore[arg-type,assignment]
    return file


@contextlib.contextmanager
def _damage_named(name: Path) -> Iterator[None]:
    try:
        yield
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise JournalError(f"{name} is damaged: {error}") from None


# ----------------------------------------------------------------------------------------------------------- writing


def begin_part(path: Path, place: Place) -> tuple[AppendedFile, Place]:
    """Finish the present part, which ends at ``place`` and is on the disk, and begin the next one. Returns the file to
    append to and the place behind its header.

    An OSError changes nothing that counts: the present part goes on. Once this returns, the new name may not be on the
    disk yet: nothing final may be acted on before the folder is synced.
    """
    header, scratch = header_after(place), scratch_of(path)
    scratch.unlink(missing_ok=True)
    file = AppendedFile(scratch, "journal", durable=True)
    try:
        file.append(header)
        file.sync()
        finished = plain_path(path, place.part)
        finished.unlink(missing_ok=True)
        failpoints.hit("part.link")
        os.link(path, finished)
        failpoints.hit("part.rename")
        try:
            file.rename(path)
        except OSError:
            # The answer of a file server may be lost after it did it.
            if not file.has_name(path):
                raise
    except OSError:
        file.close()
        with contextlib.suppress(OSError):
            scratch.unlink(missing_ok=True)
        raise
    return file, Place(place.part + 1, len(header), zlib.crc32(header), place.records)


def hold_name(path: Path, file: AppendedFile, part: int) -> None:
    """Return once ``path`` is certainly the name of ``file``, the present part, on the disk. A rename that failed in
    :func:`begin_part` may have been carried out after all. Raises OSError."""
    if not file.has_name(path):
        scratch = scratch_of(path)
        os.link(plain_path(path, part), scratch)
        scratch.replace(path)
    sync_directory(path.parent)


def compress_parts(path: Path, present: int) -> None:
    """Compress the finished parts before part ``present`` that are plain. Takes a second for a full one; most of it
    without Python's lock, so that another thread goes on."""
    for part, plain in list(beside(path)):
        if part >= present or plain.suffix != ".jsonl":
            continue
        packed = packed_path(path, part)
        scratch = packed.with_name(f".{packed.name}")
        failpoints.hit("part.compress")
        with plain.open("rb") as source, scratch.open("wb") as file:
            # Without name and time in it, equal parts are equal files.
            with gzip.GzipFile("", "wb", COMPRESSION, file, mtime=0) as packer:
                shutil.copyfileobj(source, packer, CHUNK_BYTES)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(packed)
        sync_directory(path.parent)
        failpoints.hit("part.compressed")
        plain.unlink()


def copy_journal(path: Path, into: Path) -> None:
    """Copy a journal into the folder ``into``: the present part as a file of its own, on the disk; finished parts and
    snapshots, which nobody changes, by their names. Its writer may begin a part or compress one meanwhile."""
    with path.open("rb") as source, (into / path.name).open("wb") as copy:
        line = source.readline()
        source.seek(0)
        shutil.copyfileobj(source, copy, CHUNK_BYTES)
        copy.flush()
        os.fsync(copy.fileno())
    with contextlib.suppress(ValueError, ConfigError):  # whoever reads the copy says what is wrong with it
        _link_older(path, int(_header(path, line)["part"]), into)


def _link_older(path: Path, present: int, into: Path) -> None:
    for _ in range(LOOKS):
        gone = False
        for part, name in list(beside(path)):
            if part < present or name == snapshot_path(path, present):
                try:
                    os.link(name, into / name.name)
                except FileExistsError:
                    pass
                except FileNotFoundError:  # compressed, or replaced by a newer one, since it was listed
                    gone = True
        if not gone:
            return


def link_parts(own: Path, shown: Path) -> None:
    """Let the folder of the journal ``shown`` have the finished parts and snapshots of the journal ``own``, and no
    others."""
    names = {name.name: name for _, name in beside(own)}
    for name in names.values():
        link = shown.with_name(name.name)
        if link.exists() and link.samefile(name):
            continue
        scratch = scratch_of(link)
        scratch.unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):  # compressed, or replaced by a newer one, since it was listed
            os.link(name, scratch)
            scratch.replace(link)
    for _, link in list(beside(shown)):
        if link.name not in names:
            link.unlink(missing_ok=True)
