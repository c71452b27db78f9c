"""The run directory, in which the processes of a job find what they must know of one another.

The JSON files are replaced atomically, so that a reader sees the old one or the new one. The coordinator writes its
address, the token, the journal, metrics and status; a group's leader the address at which its ranks reach it;
spare-launch the list of processes; spare-slurm the address where it takes lent nodes; a rank its notices and the
sentence of a user's error.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import socket
import stat
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TextIO

from spare_megatron.config.errors import ConfigError
from spare_megatron.runtime import failpoints
from spare_megatron.runtime.disk import with_retries, words
from spare_megatron.runtime.file_shapes import check_file

TOKEN_MIN = 16
"""Characters of a job's token; those that are made have twice as many."""


@dataclass(frozen=True)
class CoordinatorAddress:
    """The content of coordinator.json."""

    address: str
    """host:port."""
    fencing: int
    """Grows with each coordinator of a run directory; one with a lower number is ignored."""
    job_attempt: int
    """Number of the job attempt in the journal."""
    highest_incarnation: int
    """The highest incarnation that any group ever had, -1 at first; new groups get a higher one."""
    pid: int
    host: str


class RunDirectory:
    """Paths and files of one run directory."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.journal = self.path / "journal.jsonl"
        self.metrics = self.path / "metrics.jsonl"
        self.summary = self.path / "summary.json"
        self.status = self.path / "status.json"
        self.job = self.path / "job.json"
        self.report = self.path / "report.html"
        self.timeline = self.path / "timeline.pftrace"
        self.processes = self.path / "processes.json"
        self.launcher = self.path / "launcher.json"
        self.began = self.path / "began.json"
        self.ended = self.path / "ended.json"
        self.logs = self.path / "logs"
        self.errors = self.path / "errors"
        self.injected = self.path / "injected"
        self.rank_times = self.path / "rank_times"
        self.standbys = self.path / "standbys"
        self.stage = self.path / "stage"
        self.notices = self.logs / "notices.log"
        self.launcher_log = self.logs / "launcher.log"
        self.clock = self.path / "clock.json"
        self.coordinator_log = self.logs / "coordinator.log"
        self.coordinator_errors = self.logs / "coordinator.err"
        self._coordinator = self.path / "coordinator.json"
        self._latest: CoordinatorAddress | None = None
        self._token = self.path / "token"

    def create(self) -> None:
        """Make the directory; raises ConfigError where it cannot be made."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot make the run directory {self.path}: {error.strerror}") from None

    def choice(self, job_attempt: int) -> Path:
        """The file with what the job decided about itself in one job attempt (coordinator.job_tuning)."""
        return self.path / f"choice-life-{job_attempt}.json"

    def log_of(self, group: int, position: int, incarnation: int | None = None) -> Path:
        """The file of a rank's output; ``incarnation``: of a group that was started again within a job attempt."""
        later = "" if incarnation is None else f".incarnation-{incarnation}"
        return self.logs / f"group-{group}" / f"rank-{position}{later}.log"

    def rank_times_of(self, group: int, position: int, incarnation: int) -> Path:
        """The file in which a rank tells when it did what; each start of a group has its own."""
        return self.rank_times / f"group-{group}" / f"rank-{position}.incarnation-{incarnation}.jsonl"

    def place_file(self, name: str) -> Path:
        """Where the place of a process that waits for one is written; ``name``: such as 'standby-0'."""
        number = name.partition("-")[2]
        return self.standbys / f"standby-{number}.json"

    def waits(self, name: str, pid: int) -> bool:
        """Whether this process has come as far as to wait for its place."""
        return waits_file(self.place_file(name), pid).exists()

    def standby_log(self, name: str, position: int) -> Path:
        """The output of a rank of a standby, also after it has got a place."""
        return self.logs / name / f"rank-{position}.log"

    def lock(self, name: str, owner: str, *, shared: bool = False, signed: bool = True) -> Lock:
        """Hold ``name`` until the process ends, for itself or together with others that share it; raises ConfigError
        where another process holds it otherwise. ``signed``: the error of whoever cannot have it names ``owner``."""
        return Lock(self.path / f"{name}.lock", self.path, owner if signed else "", shared)

    def token(self, create: bool = False) -> str:
        """The secret that every call carries, from a file that only its owner can read. Waits for a disk that fails for
        a while; raises ConfigError where it cannot be read, or is torn: an empty one would be that of anybody."""
        try:
            if create:
                with_retries(self._make_token)
                with_retries(self._warn_if_others_can_read)
            found = with_retries(self._read_token)
        except OSError as error:
            raise ConfigError(f"cannot read the job token {self._token}: {error.strerror}") from None
        if len(found) < TOKEN_MIN or not (found.isascii() and found.isprintable()):
            raise ConfigError(
                f"the job token {self._token} is torn: it has {len(found)} characters, and must have {TOKEN_MIN} or "
                "more, all printable; remove it while the job does not run, and the next start makes another"
            )
        return found

    def _make_token(self) -> None:
        """Write the token file unless it is there. Readers never see a part of it: it gets its name when it is
        complete."""
        if self._token.exists():
            return
        failpoints.hit("token.write")
        scratch = self._token.with_name(f".token.{os.getpid()}-{socket.gethostname()}")
        scratch.unlink(missing_ok=True)
        handle = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(handle, "w") as file:
                file.write(secrets.token_hex(TOKEN_MIN))
                file.flush()
                os.fsync(file.fileno())
            with contextlib.suppress(FileExistsError):
                os.link(scratch, self._token)
            sync_path(self.path)
        finally:
            scratch.unlink()

    def _warn_if_others_can_read(self) -> None:
        mode = stat.S_IMODE(self._token.stat().st_mode)
        if mode & 0o077:
            self.notice(
                f"WARNING: others can read the job's token {self._token} (mode {mode:04o}): whoever has it can speak "
                f"for any group; chmod 600 {self._token}, and use another run directory where that does not help"
            )

    def _read_token(self) -> str:
        failpoints.hit("token.read")
        return self._token.read_text(errors="replace").strip()

    def publish_coordinator(self, address: CoordinatorAddress) -> None:
        """Write the coordinator's address into coordinator.json, unless one with a higher fencing number is there."""
        there = _address(glance(self._coordinator))
        if there is None or (there.fencing <= address.fencing and there != address):
            write_json(self._coordinator, to_keys(asdict(address)))

    def coordinator(self) -> CoordinatorAddress | None:
        """The newest coordinator that this object ever read; None before it has read one.

        An address with a lower fencing number (see coordinator.terms), or a file that cannot be read now, is ignored.
        """
        there, latest = _address(glance(self._coordinator)), self._latest
        if there is not None and (latest is None or there.fencing >= latest.fencing):
            self._latest = there
        return self._latest

    def coordinator_for_sure(self) -> CoordinatorAddress | None:
        """The coordinator that the file names now, for a process that must choose a higher fencing number.

        Raises OSError or ValueError where the file cannot be read.
        """
        return _address(read_json(self._coordinator))

    def publish_accepted(self, checkpoint: str, fencing: int) -> None:
        """Note which checkpoint was accepted last, because its writer may die before it gives it its final name.

        Each coordinator, known by its fencing number, has a file of its own: one that was stopped here while another
        has taken over cannot replace what that one has accepted since."""
        write_json(self.path / f"accepted-{fencing}.json", {"directory": checkpoint}, durable=True)
        for earlier, path in self._accepted():
            if earlier < fencing:
                path.unlink(missing_ok=True)

    def accepted(self) -> str:
        """The directory of the checkpoint that the newest coordinator accepted last, as it was when its writer asked;
        empty for none."""
        while there := self._accepted():
            plain = read_json(max(there)[1])
            if plain is not None:  # else a newer one has been written since, and this one is removed
                return str(plain["directory"])
        return ""

    def accepted_by(self) -> int:
        """The highest fencing number of a coordinator that has accepted a checkpoint; 0 for none."""
        return max(self._accepted(), default=(0, self.path))[0]

    def _accepted(self) -> list[tuple[int, Path]]:
        """(fencing number, file) of those that are there; 0 in a run directory of an earlier version."""
        with contextlib.suppress(FileNotFoundError):
            found = ((_ACCEPTED.fullmatch(path.name), path) for path in self.path.iterdir())
            return [(int(name[1] or 0), path) for name, path in found if name is not None]
        return []

    def publish_leader(self, group: int, incarnation: int, address: str) -> None:
        """Say where the leader of a group listens for its ranks."""
        directory = self.path / "leaders"
        directory.mkdir(exist_ok=True)
        write_json(directory / f"group-{group}.json", {"incarnation": incarnation, "address": address})

    def leader(self, group: int, incarnation: int) -> str | None:
        """The address at which the leader of this incarnation listens; None where it is not known now."""
        plain = glance(self.path / "leaders" / f"group-{group}.json")
        return None if plain is None or plain["incarnation"] != incarnation else str(plain["address"])

    def notice(self, text: str) -> None:
        """Pass a line for the user to spare-launch, which shows it at once; where that fails, write it to the rank's
        log."""
        line = " ".join(text.split())
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            failpoints.hit("notices.write")
            with self.notices.open("a") as file:
                file.write(line + "\n")
        except OSError as error:
            sys.stderr.write(f"spare: {line} (not shown: {self.notices} cannot be written: {words(error)})\n")

    def report_error(self, who: str, sentence: str) -> None:
        """Write a user's error, which is in the rank's log already, for spare-launch to show.

        Each rank has its own name ``who``, and so its own file, which is there once it is whole: the exit of another
        rank may have it read now.
        """
        path = self.errors / f"{who}.txt"
        scratch = scratch_of(path)
        with contextlib.suppress(OSError):
            self.errors.mkdir(parents=True, exist_ok=True)
            failpoints.hit("errors.write")
            scratch.write_text(sentence.strip() + "\n")
            failpoints.hit("errors.rename")
            scratch.replace(path)

    def sweep(self) -> None:
        """Remove what processes of this host that were killed left half written; called when none of them is there any
        more. Where the disk fails, it stays."""
        mine = re.compile(rf"\..+\.{re.escape(socket.gethostname())}-\d+-\d+")
        with contextlib.suppress(OSError):
            for folder in (self.path, self.path / "leaders", self.errors):
                for file in folder.iterdir() if folder.is_dir() else ():
                    if mine.fullmatch(file.name) and file.is_file():
                        file.unlink(missing_ok=True)

    def reported_errors(self, group: int | None = None) -> list[Path]:
        """The files that :meth:`report_error` wrote; none where the disk fails. ``group``: without those of ranks that
        are known to be of other groups."""
        try:
            files = sorted(self.errors.glob("*.txt")) if self.errors.is_dir() else []
        except OSError:
            return []
        if group is None:
            return files
        mine = f"group-{group}-"
        return [
            file for file in files if file.name.startswith(mine) or not file.name.startswith(("group-", "standby-"))
        ]


def group_of(error: Path) -> int | None:
    """The group whose rank wrote a file of :meth:`RunDirectory.report_error`; None where the rank knew none."""
    found = re.match(r"group-(\d+)-", error.name)
    return None if found is None else int(found[1])


def waits_file(place_file: Path, pid: int) -> Path:
    """The file that a process makes when it is about to wait for the place in ``place_file``."""
    return place_file.with_suffix(f".waits-{pid}")


def _address(plain: Mapping[str, Any] | None) -> CoordinatorAddress | None:
    return (
        None if plain is None else CoordinatorAddress(**{name: plain[_KEYS.get(name, name)] for name in _OF_AN_ADDRESS})
    )


_ACCEPTED = re.compile(r"accepted(?:-(\d+))?[.]json")
_OF_AN_ADDRESS = [one.name for one in fields(CoordinatorAddress)]
_KEYS = {"job_attempt": "life"}
"""Name of a field -> its key in coordinator.json and in the files of terms, where that differs."""
_NAMES = {key: name for name, key in _KEYS.items()}


def to_keys(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Fields as they stand in coordinator.json and in the files of terms, also inside other fields."""
    return {_KEYS.get(name, name): to_keys(one) if isinstance(one, Mapping) else one for name, one in plain.items()}


def of_keys(plain: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of :func:`to_keys`."""
    return {_NAMES.get(key, key): of_keys(one) if isinstance(one, Mapping) else one for key, one in plain.items()}


class Lock:
    """A lock on a file, held until :meth:`release` or the end of the process."""

    def __init__(self, path: Path, run_dir: Path, owner: str, shared: bool = False) -> None:
        try:
            self._file = path.open("a+")
        except OSError as error:
            raise ConfigError(f"cannot write in the run directory {run_dir}: {error.strerror}") from None
        try:
            fcntl.flock(self._file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError as error:
            if not isinstance(error, BlockingIOError):
                if shared:
                    return  # there are no locks here, as on some file systems of clusters
                self._file.close()
                raise ConfigError(
                    f"{path} cannot be locked: {error.strerror}; give a run directory on a file system with locks"
                ) from None
            holder = holder_of(self._file) or "another process"
            self._file.close()
            raise ConfigError(
                f"the run directory {run_dir} is in use by {holder}; end that job or give another directory"
            ) from None
        if owner:
            sign(self._file, owner)

    def release(self) -> None:
        """Release the lock, so that another process can take it."""
        self._file.close()


def sign(lock: TextIO, owner: str) -> None:
    """Write into a file that this process has locked who does so; where the disk is full nobody learns it."""
    with contextlib.suppress(OSError):
        lock.truncate(0)
        os.write(lock.fileno(), f"{owner} (pid {os.getpid()} on {socket.gethostname()})".encode())


def holder_of(lock: TextIO) -> str:
    """What the holder of a lock has written with :func:`sign`; empty where it has not yet."""
    lock.seek(0)
    return lock.read().strip()


def write_json(path: Path, value: Mapping[str, Any], durable: bool = False) -> None:
    """Replace a JSON file atomically; ``durable``: return only when it would survive a crash of the machine."""
    scratch = scratch_of(path)
    try:
        failpoints.hit_file(path, "write")
        with scratch.open("w") as file:
            file.write(json.dumps(value) + "\n")
            if durable:
                file.flush()
                failpoints.hit_file(path, "sync")
                os.fsync(file.fileno())
        failpoints.hit_file(path, "rename")
        scratch.replace(path)
        failpoints.hit_file(path, "renamed")
        if durable:
            sync_path(path.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def sync_path(path: Path) -> None:
    """Wait until a file, or the names of a directory's files, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def glance(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None where it cannot be known now: the file is not there, the disk fails, or the text
    is incomplete (on a file system whose renames are not atomic for readers)."""
    try:
        return read_json(path)
    except (OSError, ValueError):
        return None


def scratch_of(path: Path) -> Path:
    """The file to write before it is renamed to ``path``; no other thread, process or host uses the same name."""
    return path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}-{threading.get_native_id()}")


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file, None if there is no file. Raises OSError or ValueError where it cannot be read."""
    try:
        failpoints.hit_file(path, "read")
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        plain = json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(plain, dict):
        raise ValueError(f"{path} holds a {type(plain).__name__} and no JSON object")
    wrong = check_file(path.parent.name, path.name, plain)
    if wrong is not None:
        raise ValueError(f"{path} is damaged or of another version: {wrong}")
    return plain
