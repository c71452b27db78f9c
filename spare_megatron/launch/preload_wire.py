"""The messages between a preloaded parent and its client: one JSON object each, some with file descriptors, over a Unix
socket whose two ends belong to one user.

Both sides wait: a message is a question, and the next one on the other side is its answer.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import spare_megatron
from spare_megatron.runtime.socket_reads import read_exactly

PACKAGE = Path(spare_megatron.__file__).resolve().parent
_OTHER = "the other side"
_LENGTH = struct.Struct("!I")
_MOST_FDS = 8
_PEER = struct.Struct("3i")
"""struct ucred: process, user, group."""


class ForkRefusedError(Exception):
    """A parent forks nothing, and why."""

    def __init__(self, sentence: str, module: str | None = None) -> None:
        super().__init__(sentence)
        self.module = module
        """The module whose import is the reason, if one is."""


def send(sock: socket.socket, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
    """Send one message. Raises OSError where the other side is gone."""
    data = json.dumps(message).encode()
    whole = _LENGTH.pack(len(data)) + data  # at once: a short one is there whole, or not at all
    sent = socket.send_fds(sock, [whole], list(fds))
    if sent < len(whole):  # to send nothing is an error too where the other side has all that it waited for
        sock.sendall(whole[sent:])


def receive(sock: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """The next message and its descriptors, which belong to the caller. Raises OSError where the connection ends or
    breaks, or a time-out is over."""
    head, fds, _, _ = socket.recv_fds(sock, _LENGTH.size, _MOST_FDS)
    head += read_exactly(sock, _LENGTH.size - len(head), _OTHER)
    return json.loads(read_exactly(sock, _LENGTH.unpack(head)[0], _OTHER)), list(fds)


def peer_user(sock: socket.socket) -> int:
    """The user id of the process at the other end."""
    return int(_PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))[1])


def surroundings() -> dict[str, Any]:
    """What this process cannot give to one that another process forks: its namespaces, control groups, user and
    capabilities, hard limits."""
    namespaces = {name: os.readlink(f"/proc/self/ns/{name}") for name in sorted(os.listdir("/proc/self/ns"))}
    wanted = ("Uid", "Gid", "Groups", "Cap", "NoNewPrivs", "Seccomp:")
    return {
        "namespaces": namespaces,
        "control groups": _lines("/proc/self/cgroup"),
        "identity": [line for line in _lines("/proc/self/status") if line.startswith(wanted)],
        "hard limits": {name: hard for name, (_, hard) in limits().items()},
    }


def settings() -> dict[str, Any]:
    """What a process gives to those that it starts, and a forked one can be given: soft limits, umask, niceness,
    processors, readiness to be killed for memory, whether SIGHUP is ignored."""
    status = dict(line.split(":", 1) for line in _lines("/proc/self/status"))
    return {
        "limits": {name: soft for name, (soft, _) in limits().items()},
        "umask": int(status["Umask"], 8),
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "processors": sorted(os.sched_getaffinity(0)),
        "oom": int(Path("/proc/self/oom_score_adj").read_text()),
        "nohup": signal.getsignal(signal.SIGHUP) is signal.SIG_IGN,
    }


def limits() -> dict[str, tuple[int, int]]:
    """Name of a limit of this process -> its soft and hard value."""
    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    return {name: resource.getrlimit(getattr(resource, name)) for name in names}


def take_settings(wanted: Mapping[str, Any]) -> None:
    """Give this process what :func:`settings` returned in another one. Raises OSError or ValueError where it may
    not."""
    hard = {name: value for name, (_, value) in limits().items()}
    for name, soft in wanted["limits"].items():
        resource.setrlimit(getattr(resource, name), (soft, hard[name]))
    os.umask(wanted["umask"])
    if os.getpriority(os.PRIO_PROCESS, 0) != wanted["nice"]:
        os.setpriority(os.PRIO_PROCESS, 0, wanted["nice"])
    os.sched_setaffinity(0, wanted["processors"])
    oom = Path("/proc/self/oom_score_adj")
    if int(oom.read_text()) != wanted["oom"]:
        oom.write_text(str(wanted["oom"]))


def code_stamp() -> list[Any]:
    """What changes when a file of the package changes: its place, the number of its sources and libraries, and the
    newest change."""
    newest, count = 0, 0
    for folder, _, names in os.walk(PACKAGE):
        for name in names:
            if name.endswith((".py", ".so")):
                newest, count = max(newest, os.stat(os.path.join(folder, name)).st_mtime_ns), count + 1
    return [str(PACKAGE), count, newest]


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()
