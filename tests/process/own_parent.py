"""Preloaded parents that a test starts itself: over a pair of sockets, or listening at a path."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from spare_megatron.launch.preload_client import ParentLink
from tests import preloaded
from tests.polling import until
from tests.process.harness import ROOT


@contextlib.contextmanager
def own_parent(
    *modules: str, search_path: Sequence[str] = (), **environ: str
) -> Iterator[tuple[ParentLink, subprocess.Popen[bytes]]]:
    """A parent that has imported no more than these modules, and its process."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "spare_megatron.launch.preloaded_parent", "--fd", str(theirs.fileno())],
            cwd=ROOT,
            env={**preloaded.environment(), **environ},
            pass_fds=[theirs.fileno()],
        )
    link = ParentLink(ours)
    try:
        link.greet(modules, search_path or [str(ROOT), *environ.get("PYTHONPATH", "").split(), *sys.path[1:]])
        link.receive()
        yield link, process
    finally:
        link.close()
        process.wait()


@contextlib.contextmanager
def listening(path: Path, *modules: str, **environ: str) -> Iterator[Path]:
    """A parent that listens at ``path``."""
    process = subprocess.Popen(
        [sys.executable, "-m", "spare_megatron.launch.preloaded_parent", "--listen", str(path), *modules],
        cwd=ROOT,
        env={**preloaded.environment(), **environ},
        stdin=subprocess.PIPE,
    )
    try:
        until("its socket", lambda: path.exists() or process.poll() is not None)
        yield path
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()


def start(link: ParentLink, command: list[str], log: Path, directory: Path, **environ: str) -> Any:
    """Fork a process with its output in ``log``."""
    with open(os.devnull, "rb") as nothing, log.open("ab") as out:
        streams = (nothing.fileno(), out.fileno(), out.fileno())
        process = link.start(command, {**preloaded.environment(), **environ}, streams, str(directory))
    process.release()
    return process
