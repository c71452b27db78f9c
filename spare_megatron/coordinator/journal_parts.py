"""The files of a journal: parts that follow each other, and the lines in them.

Part k is the file ``journal-00000k.jsonl``; once it is *finished* nobody changes it any more, and it becomes
``journal-00000k.jsonl.gz``. The coordinator appends to the last part, which ``journal.jsonl`` names too, for people and
as a place to begin reading. Each part begins with a header::

    {"format": 3, "part": 3, "first": 164042, "crc32_before": 2774519105}

the number of its first record, and the checksum of all bytes of the part before. So a part that is missing, or of
another journal, is noticed.

What must hold, whatever is killed or stopped between two file operations, and also for a reader on another host that
sees a new name some time late:

1. ``journal.jsonl`` is there as soon as one record was written, and is a part that has begun, the last one or an older.
   A reader goes on from it as long as there is a next part with a header. (A torn header is none.)
2. The file of a part is made, empty, long before its first byte is written (``journal.NAME_SEEN_S``), so everybody who
   looks for it sees it; what is in it by then is seen by whoever opens it later.
3. A finished part ends with a final record, which was on the disk and confirmed. So it is the beginning of the journal
   of every later holder of the lease, however late the next part is begun.
4. A finished part that a reader needs is there, plain or compressed; where both are, the plain one counts.
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

from spare_megatron.config.errors import ConfigError
from spare_megatron.runtime import failpoints
from spare_megatron.runtime.run_directory import scratch_of, sync_path

FORMAT = 8
"""Grows with every change after which this code would read older journals or snapshots wrongly. Journals without a
header are format 1."""
COMPRESSION = 6
CHUNK_BYTES = 1 << 20
LOOKS = 5
"""A finished part may be compressed while a reader looks for it: so often both of its names are tried."""


class JournalError(ValueError):
    """A journal that no coordinator can have written, or whose replay decides something else."""


class JournalPlace(NamedTuple):
    """A place in a journal, behind a whole line."""

    part: int = 1
    offset_bytes: int = 0
    """Length of the part up to here, before any compression."""
    crc32: int = 0
    """Checksum of these bytes."""
    records: int = 0
    """Number of records in the whole journal up to here."""

    def after(self, lines: bytes, records: int = 1) -> JournalPlace:
        """The place behind ``lines``, which have so many records."""
        return JournalPlace(
            self.part, self.offset_bytes + len(lines), zlib.crc32(lines, self.crc32), self.records + records
        )


BEGIN = JournalPlace()


def header_after(place: JournalPlace) -> bytes:
    """The header of the part that begins at ``place``: of the next one, or, at the beginning, of the first."""
    part = place.part + 1 if place.offset_bytes else place.part
    plain = {"format": FORMAT, "part": part, "first": place.records + 1, "crc32_before": place.crc32}
    return json.dumps(plain, separators=(",", ":")).encode() + b"\n"


def snapshot_path(path: Path, part: int) -> Path:
    """The newest snapshot that was taken in a part of the journal ``path``."""
    return path.with_name(f"snapshot-{part:06d}.json")


def plain_path(path: Path, part: int) -> Path:
    """A part before it is compressed. Part 1 may have only the name ``path`` while it is the last."""
    return path.with_name(f"{path.stem}-{part:06d}.jsonl")


def packed_path(path: Path, part: int) -> Path:
    """A finished part, compressed."""
    return path.with_name(f"{path.stem}-{part:06d}.jsonl.gz")


def beside(path: Path) -> Iterator[tuple[int, Path]]:
    """(number, file) of every part and snapshot in the folder of the journal ``path``, but for ``path`` itself."""
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

    def __init__(self, path: Path, start: JournalPlace = BEGIN) -> None:
        self._path, self._start = path, start
        self.end = start
        """The place up to which lines or headers were read."""

    def __iter__(self) -> Iterator[tuple[JournalPlace, bytes, JournalPlace]]:
        with contextlib.ExitStack() as files:
            # Opened before the others are read: a part that begins meanwhile is no part of what is read now.
            found = _open_last(files, self._path)
            if found is None:
                return
            last, last_name, last_file = found
            if self._start.part > last:
                raise JournalError(f"{self._path} ends with part {last}, before the place to go on from")
            for part in range(self._start.part, last + 1):
                name, file = (last_name, last_file) if part == last else _open_finished(self._path, part)
                with contextlib.closing(file), _damage_named(name):
                    yield from self._lines_of(name, file, part, torn=part == last)

    def _lines_of(
        self, name: Path, file: IO[bytes], part: int, torn: bool
    ) -> Iterator[tuple[JournalPlace, bytes, JournalPlace]]:
        at = self.end
        if at.part == part and at.offset_bytes:
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


def last_part(path: Path) -> int:
    """The number of the last part that has begun; 0 where nothing is written yet. Raises as :class:`JournalLines`."""
    with contextlib.ExitStack() as files:
        found = _open_last(files, path)
        return 0 if found is None else found[0]


def _open_last(files: contextlib.ExitStack, path: Path) -> tuple[int, Path, IO[bytes]] | None:
    """(number, name, file at its beginning) of the last part that has begun; None where nothing is written yet."""
    name, file = path, _open_begun(files, path)
    if file is None:
        left = [name for _, name in beside(path)] if path.parent.is_dir() else []
        if left:
            raise JournalError(f"{path} is not there or empty, but there is {left[-1].name}, of the same journal")
        return None
    part = int(_header(path, file.readline())["part"])
    file.seek(0)
    while True:
        following = _open_begun(files, plain_path(path, part + 1))
        if following is not None:
            part, name, file = part + 1, plain_path(path, part + 1), following
        elif packed_path(path, part + 1).exists():  # ``path`` names an old part
            part += 1
        else:
            return part, name, file


def _open_begun(files: contextlib.ExitStack, name: Path) -> IO[bytes] | None:
    """A part at its beginning; None where it is not there or has no whole header."""
    try:
        file: IO[bytes] = files.enter_context(name.open("rb"))
    except FileNotFoundError:
        return None
    if not file.readline().endswith(b"\n"):
        return None
    file.seek(0)
    return file


def _behind_header(name: Path, file: IO[bytes], at: JournalPlace) -> JournalPlace:
    """The place behind the header of the part that begins at ``at``."""
    line, expected = file.readline(), header_after(at)
    header = _header(name, line)
    if header != json.loads(expected):
        raise JournalError(f"{name} does not follow the part before it: its header is {header}, not {expected!r}")
    return JournalPlace(header["part"], len(line), zlib.crc32(line), at.records)


def _skip(name: Path, file: IO[bytes], at: JournalPlace) -> None:
    """Read up to a place, whose bytes must be the same as when it was noted."""
    left, crc32 = at.offset_bytes, 0
    while left:
        chunk = file.read(min(left, CHUNK_BYTES))
        if not chunk:
            break
        left, crc32 = left - len(chunk), zlib.crc32(chunk, crc32)
    if left or crc32 != at.crc32:
        raise JournalError(
            f"the first {at.offset_bytes} bytes of {name} are not those of record {at.records} and before"
        )


def _header(name: Path, line: bytes) -> dict[str, Any]:
    """The header in the first line of a part. Raises ConfigError where the journal has another format."""
    try:
        plain: dict[str, Any] = json.loads(line)
        found = plain.get("format", 1 if "n" in plain else None)
    except (ValueError, AttributeError, TypeError, RecursionError):
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
    file: IO[bytes] = io.BufferedReader(gzip.GzipFile(name), CHUNK_BYTES)
    return file


@contextlib.contextmanager
def _damage_named(name: Path) -> Iterator[None]:
    try:
        yield
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise JournalError(f"{name} is damaged: {error}") from None


# ----------------------------------------------------------------------------------------------------------- writing


def last_path(path: Path, part: int) -> Path:
    """The file to append to where ``part`` is the last part."""
    return plain_path(path, part) if part > 1 else path


def prepare_part(path: Path, part: int) -> None:
    """Make the file of the part after the last one, empty, with its name on the disk. Raises OSError."""
    failpoints.hit("part.prepare")
    if part == 2:
        link_over(path, plain_path(path, 1))
    os.close(os.open(plain_path(path, part), os.O_WRONLY | os.O_CREAT, 0o666))
    sync_path(path.parent)


def tidy_parts(path: Path, last: int) -> None:
    """Let ``path`` name the last part, and compress those before it that are plain. Takes a second for a full one; most
    of it without Python's lock, so that another thread goes on. Raises OSError; nothing depends on its success."""
    if last > 1:
        failpoints.hit("part.show")
        link_over(plain_path(path, last), path)
    compress_parts(path, last)


def link_over(own: Path, name: Path) -> None:
    """Let ``name`` be another name of ``own``, in place of the file that has it."""
    if name.exists() and name.samefile(own):
        return
    scratch = scratch_of(name)
    scratch.unlink(missing_ok=True)
    os.link(own, scratch)
    scratch.replace(name)


def compress_parts(path: Path, last: int) -> None:
    """Compress the parts before the last one that are plain."""
    for part, plain in list(beside(path)):
        if part >= last or plain.suffix != ".jsonl":
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
        sync_path(path.parent)
        failpoints.hit("part.compressed")
        plain.unlink()


def copy_journal(path: Path, into: Path) -> None:
    """Copy a journal into the folder ``into``: the last part as a file of its own, on the disk; finished parts and
    snapshots, which nobody changes, by their names. Its writer may begin a part or compress one meanwhile, but makes no
    record final any more."""
    try:
        last = last_part(path)
    except (JournalError, ConfigError):
        last = 0  # whoever reads the copy says what is wrong with it
    own = last_path(into / path.name, last)
    with last_path(path, last).open("rb") as file, own.open("wb") as copy:
        shutil.copyfileobj(file, copy, CHUNK_BYTES)
        copy.flush()
        os.fsync(copy.fileno())
    if last > 1:
        os.link(own, into / path.name)
    for _ in range(LOOKS):
        gone = False
        for part, name in list(beside(path)):
            if part < last or name == snapshot_path(path, last):
                gone = _link_beside(name, into) or gone
        if not gone:
            return


def _link_beside(name: Path, into: Path) -> bool:
    """True where the file is gone: compressed, or replaced by a newer one, since it was listed."""
    try:
        os.link(name, into / name.name)
    except FileExistsError:
        pass
    except FileNotFoundError:
        return True
    return False


def link_parts(own: Path, shown: Path) -> None:
    """Let the folder of the journal ``shown`` have the parts and snapshots of the journal ``own``, and no others."""
    names = {name.name: name for _, name in beside(own)}
    for name in names.values():
        with contextlib.suppress(FileNotFoundError):
            link_over(name, shown.with_name(name.name))
    for _, link in list(beside(shown)):
        if link.name not in names:
            link.unlink(missing_ok=True)
