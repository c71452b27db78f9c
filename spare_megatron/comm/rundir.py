"""The run directory: what the processes of a job must know of one another, as files.

Every file is replaced atomically, so that a reader sees the old one or the new one. Who writes what: the
coordinator its address, token, journal, metrics and status; a group's leader the address for its ranks; spare-launch
the process list; a rank the sentence of a user's error.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from spare_megatron import failpoints
from spare_megatron.config.errors import ConfigError


@dataclass(frozen=True)
class CoordinatorAddress:
    """coordinator.json."""

    address: str
    """host:port."""
    fencing: int
    """Grows with each coordinator of a run directory: a lower one is not listened to any more."""
    life: int
    """Number of the job's life in the journal."""
    highest_incarnation: int
    """Highest that any group ever had, -1 at first: whoever starts groups begins above it."""
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
        self.processes = self.path / "processes.json"
        self.logs = self.path / "logs"
        self.errors = self.path / "errors"
        self.injected = self.path / "injected"
        self.notices = self.logs / "notices.log"
        self.coordinator_log = self.logs / "coordinator.log"
        self.coordinator_errors = self.logs / "coordinator.err"
        self._coordinator = self.path / "coordinator.json"
        self._latest: CoordinatorAddress | None = None
        self._accepted = self.path / "accepted.json"
        self._token = self.path / "token"

    def create(self) -> None:
        """Make the directory; raises ConfigError where that is impossible."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot make the run directory {self.path}: {error.strerror}") from None

    def choice(self, life: int) -> Path:
        """What the job decided about itself in one life (recovery.tuning)."""
        return self.path / f"choice-life-{life}.json"

    def log_of(self, group: int, position: int) -> Path:
        """Where a rank's output goes."""
        return self.logs / f"group-{group}" / f"rank-{position}.log"

    def lock(self, name: str, owner: str) -> Lock:
        """Hold ``name`` until the process ends; raises ConfigError where another process holds it."""
        return Lock(self.path / f"{name}.lock", self.path, owner)

    def token(self, create: bool = False) -> str:
        """The secret that every call carries; readable by its owner alone."""
        if create:
            failpoints.hit("token.write")
            try:
                handle = os.open(self._token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            except FileExistsError:
                pass
            else:
                with os.fdopen(handle, "w") as file:
                    file.write(secrets.token_hex(16))
        try:
            failpoints.hit("token.read")
            return self._token.read_text().strip()
        except OSError as error:
            raise ConfigError(f"cannot read the job token {self._token}: {error.strerror}") from None

    def publish_coordinator(self, address: CoordinatorAddress) -> None:
        """Let coordinator.json name a coordinator, unless it names a later one, with a higher fencing number."""
        there = self._read_coordinator()
        if there is None or (there.fencing <= address.fencing and there != address):
            write_json(self._coordinator, asdict(address))

    def coordinator(self) -> CoordinatorAddress | None:
        """Where the coordinator is, None before the first one is seen.

        The latest that this object ever read: a name with a lower fencing number (see recovery.terms) or a file that
        cannot be read just now says nothing new.
        """
        there, latest = self._read_coordinator(), self._latest
        if there is not None and (latest is None or there.fencing >= latest.fencing):
            self._latest = there
        return self._latest

    def _read_coordinator(self) -> CoordinatorAddress | None:
        """What coordinator.json says now; None where it cannot be read."""
        try:
            plain = read_json(self._coordinator)
            return None if plain is None else CoordinatorAddress(**plain)
        except (OSError, ValueError, TypeError):
            return None

    def publish_accepted(self, checkpoint: str) -> None:
        """Note which checkpoint was accepted last: its writer may die before it gets its name."""
        write_json(self._accepted, {"directory": checkpoint}, durable=True)

    def accepted(self) -> str:
        """The directory of the checkpoint that was accepted last, as it was when its writer asked; empty for none."""
        plain = read_json(self._accepted)
        return "" if plain is None else str(plain["directory"])

    def publish_leader(self, group: int, incarnation: int, address: str) -> None:
        """Say where the leader of a group listens for its ranks."""
        directory = self.path / "leaders"
        directory.mkdir(exist_ok=True)
        write_json(directory / f"group-{group}.json", {"incarnation": incarnation, "address": address})

    def leader(self, group: int, incarnation: int) -> str | None:
        """Where the leader of this incarnation listens; None before it does."""
        plain = read_json(self.path / "leaders" / f"group-{group}.json")
        return None if plain is None or plain["incarnation"] != incarnation else str(plain["address"])

    def notice(self, text: str) -> None:
        """One line from a rank for the user, shown by spare-launch as it comes."""
        self.logs.mkdir(parents=True, exist_ok=True)
        failpoints.hit("notices.write")
        with self.notices.open("a") as file:
            file.write(" ".join(text.split()) + "\n")

    def report_error(self, who: str, sentence: str) -> None:
        """Leave a user's error for spare-launch to show; the name keeps two ranks apart."""
        self.errors.mkdir(parents=True, exist_ok=True)
        failpoints.hit("errors.write")
        (self.errors / f"{who}.txt").write_text(sentence.strip() + "\n")


class Lock:
    """An exclusive lock on a file, held until :meth:`release` or the end of the process."""

    def __init__(self, path: Path, run_dir: Path, owner: str) -> None:
        try:
            self._file = path.open("a+")
        except OSError as error:
            raise ConfigError(f"cannot write in the run directory {run_dir}: {error.strerror}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.seek(0)
            holder = self._file.read().strip() or "another process"
            self._file.close()
            raise ConfigError(
                f"the run directory {run_dir} is in use by {holder}; end that job or give another directory"
            ) from None
        self._file.truncate(0)
        self._file.write(f"{owner} (pid {os.getpid()} on {socket.gethostname()})")
        self._file.flush()

    def release(self) -> None:
        """Let the next one have it."""
        self._file.close()


def write_json(path: Path, value: Mapping[str, Any], durable: bool = False) -> None:
    """Replace a JSON file atomically; ``durable``: it must survive the machine's death too."""
    scratch = scratch_of(path)
    failpoints.hit_file(path, "write")
    with scratch.open("w") as file:
        json.dump(value, file)
        file.write("\n")
        if durable:
            file.flush()
            failpoints.hit_file(path, "sync")
            os.fsync(file.fileno())
    failpoints.hit_file(path, "rename")
    scratch.replace(path)
    failpoints.hit_file(path, "renamed")


def scratch_of(path: Path) -> Path:
    """Where to make what is to become ``path``: a name of this thread of this process on this host alone."""
    return path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}-{threading.get_native_id()}")


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON file's object, None if it is not there."""
    try:
        failpoints.hit_file(path, "read")
        text = path.read_text()
    except FileNotFoundError:
        return None
    plain: dict[str, Any] = json.loads(text)
    return plain
