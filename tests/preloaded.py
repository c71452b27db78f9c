"""One preloaded parent for the tests of a process: their ranks are forked, and import nothing.

It is started when a test first needs it, and ends with the process of the tests, whose end of its standard input then
closes. A parent that was started with older files of the package forks nothing, so no test runs other code than it
should.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from spare_megatron.launch.preload_client import ForkedProcess, ParentLink, connect
from spare_megatron.launch.preloaded_ranks import LISTENING
from spare_megatron.launch.script_modules import OF_A_JOB

ROOT = Path(__file__).resolve().parent.parent
READY_S = 120.0
"""How long its imports may take."""


def environment() -> dict[str, str]:
    """The environment of the tests' processes: one thread each, this checkout first on the path, output at once."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}


@functools.cache
def socket_path() -> str:
    """Where the parent listens; starts it."""
    given = os.environ.get(LISTENING)
    if given:
        return given
    folder = Path(tempfile.mkdtemp(prefix="preloaded-"))
    path = folder / "socket"
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "spare_megatron.launch.preloaded_parent", "--listen", str(path), *OF_A_JOB],
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            process_group=0,
        )

    def end() -> None:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(end)
    deadline_s = time.monotonic() + READY_S
    while not path.exists():
        assert process.poll() is None, f"the preloaded parent has ended: {(folder / 'log').read_text()}"
        assert time.monotonic() < deadline_s, "the preloaded parent is not ready"
        time.sleep(0.02)
    return str(path)


@functools.cache
def _link() -> ParentLink:
    asked = [sys.executable, "-c", "import json, sys; print(json.dumps(sys.path))"]  # that of this process has more
    search_path = json.loads(subprocess.check_output(asked, cwd=ROOT, env=environment()))
    link = connect(Path(socket_path()), OF_A_JOB, search_path, environment())
    atexit.register(link.close)
    return link


def fork(command: list[str], environ: dict[str, str], log: Path, directory: Path = ROOT) -> ForkedProcess:
    """Start ``command``, a script or ``-m`` and a module behind the interpreter, with its output in ``log``."""
    with open(os.devnull, "rb") as nothing, log.open("wb") as out:
        return _link().start(command, environ, (nothing.fileno(), out.fileno(), out.fileno()), str(directory))
