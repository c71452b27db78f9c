"""Failpoints: named places in the code at which a test lets the disk, the network or the process fail.

A fault is written ``[ROLE:]PLACE=ACTION[,after=N][,times=N][,for_s=S][,while=PATH][,once=PATH]``; several are separated
by ``;``. They come from the environment variable SPARE_FAILPOINTS, or in the same process from :func:`injected`.
Without faults, a place costs one check of a global variable.

* ROLE is the process: ``coordinator``, ``coordinator-1`` (a candidate), ``launch``, ``preload`` (the parent of forked
  ranks), ``rank-0-1`` (group 0, position 1),
  ``leader-0`` (of group 0, where it has a process of its own); a prefix means all of them: ``rank-0`` all ranks of
  group 0, ``rank`` every rank. Without a role it is every process.
* ACTION is the name of an errno (``ENOSPC``, ``EIO``, ``ESTALE``, ``ECONNRESET``, ...), raised as OSError; ``kill`` or
  ``stop``: the process gets a SIGKILL or SIGSTOP; ``sleep:S``: it sleeps S seconds; ``hold:S``: it does so with the
  interpreter's lock, so that no other thread runs Python; ``short:N``, only at the ``.write`` of an appended file: only
  the first N bytes are written.
* ``after=N``: nothing happens the first N times that the process passes the place. ``times=N``: the action happens N
  times, then no more. ``for_s=S``: it happens for S seconds from the first time on. ``while=PATH``: it happens only
  while that file exists. ``once=PATH``: it happens only to the process that removes that file, the first one that
  passes the place while the file is there. Without these conditions it happens every time.

The places are :data:`PLACES`, and for each file in :data:`APPENDED` and :data:`REPLACED`, ``FILE.OPERATION`` with the
operations in :data:`OPERATIONS_OF_APPENDED` and :data:`OPERATIONS_OF_REPLACED`. A number in a file's name is written N:
``group-N.json.rename``.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spare_megatron.config.errors import ConfigError

VARIABLE = "SPARE_FAILPOINTS"
FORM = "[ROLE:]PLACE=ACTION[,after=N][,times=N][,for_s=S][,while=PATH][,once=PATH]"

PLACES = {
    "order.welcome": "the coordinator writes a welcome to a leader's stream",
    "order.refused": "the coordinator writes a refusal to a leader's stream",
    "order.neighbour": "the coordinator writes the addresses of a group's ring neighbour to its leader's stream",
    "order.donors": "the coordinator writes the addresses of an offer's donors to a learner's leader's stream",
    "order.view": "the coordinator writes a view to a leader's stream",
    "order.commit": "the coordinator writes a commit to a leader's stream",
    "order.fenced": "the coordinator writes to a leader's stream that its group is fenced",
    "order.stop": "the coordinator writes to a leader's stream that the job is over",
    "order.save_accepted": "the coordinator writes to a leader's stream that a checkpoint counts",
    "order.asked": "the coordinator writes to a leader's stream that its group may give back pieces",
    "order.tickets": "a leader writes words of the ticket stream to one of its ranks",
    "order.sent": "the coordinator has written any order",
    "report.arrival": "a leader or a rank writes its arrival",
    "report.heartbeat": "a leader writes the heartbeat of its group",
    "report.ballot": "a leader writes the vote of its group",
    "report.applied": "a leader or a rank writes that it holds a state",
    "report.ready": "a leader or a rank writes that a learner could take an offer",
    "report.caught_up": "a leader or a rank writes that a learner or joiner holds a state",
    "report.void": "a leader or a rank writes that an offer cannot be had",
    "report.withdrawn": "a leader or a rank writes that an offer is served no longer",
    "report.runs_out": "a leader writes that half of its group's tickets are begun, or all issued",
    "report.gave_back": "a leader writes which pieces its group gives back",
    "report.hosts": "a leader writes that its group has opened an adopted shard, or cannot",
    "report.have": "a rank or a leader writes that it has the state of a shard, or cannot have it",
    "report.opened": "a rank writes to its leader that it has opened an adopted shard, or cannot",
    "report.saved": "a leader asks the coordinator whether a complete checkpoint counts",
    "report.step_report": "a leader or a rank writes the figures of a step",
    "report.seen": "a rank writes that an epoch is known",
    "report.stop_request": "a leader or a rank writes that the job is asked to leave",
    "report.rank_closed": "a leader writes that a rank's connection closed or is back",
    "report.beat": "a rank writes its heartbeat",
    "report.begun": "position 0 writes to its leader that it has begun the last ticket that it knows",
    "report.reduced": "a rank writes to its leader that a reduction ended",
    "report.save_request": "a rank asks its leader whether a complete checkpoint counts",
    "report.sent": "a leader or a rank has written any report",
    "checkpoint.file": "a file of a checkpoint is written, before it is synced",
    "checkpoint.publish": "an accepted checkpoint is about to get its name",
    "checkpoint.published": "a checkpoint has its name, and is not marked as the newest yet",
    "checkpoint.retire": "a published checkpoint is about to lose its name",
    "term.claim": "a candidate is about to claim the next term",
    "term.claimed": "a candidate has claimed a term, and is about to wait for the holder before it",
    "term.copy": "a candidate has waited after its claim, and is about to copy the journal",
    "term.open": "a candidate has copied the journal, and is about to open its term with the copy",
    "term.show": "journal.jsonl or metrics.jsonl is about to become the present term's",
    "part.prepare": "the empty file of the journal's next part is about to be made",
    "part.begin": "the next part of the journal is about to get its header",
    "part.show": "journal.jsonl is about to become a name of the last part",
    "part.compress": "a finished part of the journal is about to be compressed",
    "part.compressed": "a finished part is compressed, and the plain one is about to be removed",
    "processes.log": "the log of a process that is started is about to be opened",
    "token.read": "the job token is about to be read",
    "token.write": "the job token is about to be written",
    "notices.write": "a rank's line for the user is about to be written",
    "errors.write": "a user's error is about to be written",
    "errors.rename": "a user's error is written, and its file is about to have its name",
    "rank_times.write": "a rank is about to write when it did the parts of a step",
    "preload.request": "a preloaded parent has received a request, and has done nothing for it yet",
    "command.begin": "the process of a user's command is there, and the guard is about to hear of it",
    "preload.fork": "a preloaded parent is about to fork",
    "injected.write": "the mark that an injection was done is about to be written",
}
"""Place -> when the code passes it."""

APPENDED = ("journal", "metrics")
"""Files that grow by whole lines."""
OPERATIONS_OF_APPENDED = ("open", "write", "written", "sync", "synced", "cut")
"""``open``, ``write``, ``sync`` and ``cut`` (of a torn end) are passed before the operation, the others after it."""

REPLACED = (
    "coordinator.json",
    "clock.json",
    "accepted-N.json",
    "began.json",
    "ended.json",
    "job.json",
    "snapshot-N.json",
    "status.json",
    "summary.json",
    "processes.json",
    "launcher.json",
    "choice-life-N.json",
    "group-N.json",
    "group-N-store.json",
    "standby-N-store.json",
    "standby-N.json",
    "N.json",
    "idle_lives.json",
    "spare_manifest.json",
    "latest_checkpointed_iteration.txt",
)
"""Files that are replaced as a whole; ``N.json`` is a term's."""
OPERATIONS_OF_REPLACED = ("read", "write", "sync", "rename", "renamed")
"""All are passed before the operation (``rename``: before the new content gets the file's name), ``renamed`` after
it."""

_ACTIONS = ("kill", "stop", "sleep", "hold", "short")


def strike_here(number: signal.Signals) -> None:
    """Give this process a signal that takes effect before the calling thread runs on. Given to the process, SIGSTOP is
    taken by any of its threads, the main one first, and this one goes on for as long as that one takes to wake up."""
    signal.pthread_kill(threading.get_ident(), number)


@dataclass
class _Fault:
    """One fault, and how often its place was passed."""

    role: str
    place: str
    action: str
    amount: float = 0.0
    """Number of bytes for ``short``, of seconds for ``sleep`` and ``hold``."""
    after: int = 0
    times: int | None = None
    for_s: float | None = None
    while_there: str = ""
    once: str = ""
    passed: int = 0
    struck: int = 0
    since_s: float = 0.0

    def due(self, now_s: float) -> bool:
        """Count that the place is passed; True when the fault strikes."""
        if self.while_there and not os.path.exists(self.while_there):
            return False
        self.passed += 1
        if self.passed <= self.after or (self.times is not None and self.struck >= self.times):
            return False
        if not self.struck:
            self.since_s = now_s
        if self.for_s is not None and now_s - self.since_s > self.for_s:
            return False
        if self.once:
            try:
                os.unlink(self.once)
            except FileNotFoundError:
                return False
        self.struck += 1
        return True


_role = ""
_lock = threading.Lock()
_faults: Sequence[_Fault] | None = None
"""The faults of this process; None: the variable is not read yet."""
_armed = bool(os.environ.get(VARIABLE))


def read_environment() -> None:
    """Read the variable anew, in a process that was forked: it has an environment of its own, and no role yet."""
    global _role, _faults, _armed
    _role, _faults, _armed = "", None, bool(os.environ.get(VARIABLE))


def act_as(role: str) -> None:
    """Set the role of this process; raises ConfigError where the variable is malformed."""
    global _role
    _role = role
    if _armed:
        _present()


def hit(place: str) -> None:
    """The process passes ``place``: strike the faults that are due there. Raises OSError where one is an errno."""
    if _armed:
        _strike(place)


def hit_file(path: Path, operation: str) -> None:
    """The process does ``operation`` on a file: strike the faults that are due there. Raises OSError where one is an
    errno."""
    if _armed:
        _strike(f"{file_name(path)}.{operation}", path=path)


def hit_message(stream: str, message: Any) -> None:
    """The process is about to write ``message``, whose union ``kind`` gives the place: a commit among the orders is at
    ``order.commit``."""
    if _armed:
        _strike(f"{stream}.{message.WhichOneof('kind')}")


def cut(place: str, data: bytes) -> bytes:
    """The process is about to write ``data`` at ``place``: strike the faults that are due there, and return the bytes
    to write, which a fault may have cut short."""
    return _strike(place, data) if _armed else data


def file_name(path: Path) -> str:
    """A file's name as it is written in places: each number is N."""
    return re.sub(r"\d+", "N", path.name)


@contextlib.contextmanager
def injected(text: str) -> Iterator[None]:
    """Inside the block the faults of this process are those of ``text``; raises ConfigError where it is malformed."""
    global _faults, _armed
    before = _faults, _armed
    _faults, _armed = parse(text), True
    try:
        yield
    finally:
        _faults, _armed = before


def _present() -> Sequence[_Fault]:
    global _faults
    if _faults is None:
        _faults = parse(os.environ.get(VARIABLE, ""))
    return _faults


def _strike(place: str, data: bytes = b"", path: Path | None = None) -> bytes:
    faults = _present()
    with _lock:
        now_s = time.monotonic()
        due = [fault for fault in faults if fault.place == place and _is_here(fault.role) and fault.due(now_s)]
    for fault in due:
        if fault.struck == 1:
            sys.stderr.write(f"failpoint {place}: {fault.action}\n")
            sys.stderr.flush()
        if fault.action == "kill":
            strike_here(signal.SIGKILL)
        elif fault.action == "stop":
            strike_here(signal.SIGSTOP)
        elif fault.action == "sleep":
            time.sleep(fault.amount)
        elif fault.action == "hold":
            ctypes.PyDLL(None).usleep(int(1e6 * fault.amount))
        elif fault.action == "short":
            data = data[: int(fault.amount)]
        else:
            number = getattr(errno, fault.action)
            raise OSError(number, os.strerror(number), None if path is None else str(path))
    return data


def _is_here(role: str) -> bool:
    return not role or _role == role or _role.startswith(f"{role}-")


def known_places() -> list[str]:
    """The names of all places."""
    appended = [f"{name}.{operation}" for name in APPENDED for operation in OPERATIONS_OF_APPENDED]
    replaced = [f"{name}.{operation}" for name in REPLACED for operation in OPERATIONS_OF_REPLACED]
    return [*PLACES, *appended, *replaced]


def parse(text: str) -> list[_Fault]:
    """Parse faults as a test writes them.

    Raises:
        ConfigError: the message names the part that is wrong and what it may be.
    """
    return [_parse_one(one.strip()) for one in text.split(";") if one.strip()]


def _parse_one(text: str) -> _Fault:
    head, *conditions = text.split(",")
    where, equals, what = head.partition("=")
    role, _, place = where.rpartition(":")
    action, _, amount = what.partition(":")
    if not equals or place not in known_places():
        raise ConfigError(
            f"{VARIABLE}: {text!r}: {place!r} is no place; the form is {FORM}, see spare_megatron.runtime.failpoints"
        )
    if action not in _ACTIONS and not (action.startswith("E") and hasattr(errno, action)):
        raise ConfigError(
            f"{VARIABLE}: {text!r}: {what!r} is no action; use kill, stop, sleep:S, hold:S, short:N or an errno such "
            "as ENOSPC"
        )
    if action == "short" and place not in [f"{name}.write" for name in APPENDED]:
        raise ConfigError(f"{VARIABLE}: {text!r}: nothing is cut short at {place}; use journal.write or metrics.write")
    fault = _Fault(role, place, action)
    if action in ("sleep", "hold", "short"):
        fault.amount = _number(text, action, amount)
    for condition in conditions:
        name, _, value = condition.partition("=")
        if name == "after":
            fault.after = int(_number(text, name, value))
        elif name == "times":
            fault.times = int(_number(text, name, value))
        elif name == "for_s":
            fault.for_s = _number(text, name, value)
        elif name == "while" and value:
            fault.while_there = value
        elif name == "once" and value:
            fault.once = value
        else:
            raise ConfigError(f"{VARIABLE}: {text!r}: {condition!r} is no condition; the form is {FORM}")
    return fault


def _number(text: str, name: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise ConfigError(f"{VARIABLE}: {text!r}: {name} is {value!r}, but must be a number of at least 0")
    return number
