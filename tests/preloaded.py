"""One preloaded parent for the tests: their ranks are forked, and import nothing.

It is started when a test first needs it, or for all workers at once, and ends with the process that has started it,
whose end of its standard input then closes. A parent that was started with older files of the package forks nothing, so
no test runs other code than it should.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

from spare_megatron.launch.preload_client import ForkedProcess, ParentLink, connect
from spare_megatron.launch.preloaded_ranks import LISTENING
from spare_megatron.launch.script_modules import OF_A_JOB
from spare_megatron.runtime.import_variables import import_environment

ROOT = Path(__file__).resolve().parent.parent
SMALLER = "tests.small_mock_data"
_CONTROL = ("spare_megatron.coordinator.process", "spare_megatron.cli.launch", "spare_megatron.cli.report")
"""What coordinators and launchers import beside what ranks do."""
_IMPORTED = (*OF_A_JOB, SMALLER, "tests.quick_end", *_CONTROL, "tests.computed_once", "tests.huge_pages")
_SHARED = "SPARE_TESTS_PARENT"
READY_S = 120.0
"""How long its imports may take."""
_ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}


def environment() -> dict[str, str]:
    """The environment of the tests' processes: one thread each, this checkout first on the path, output at once. All
    else is as this process was started with: megatron-core, torch and tests set variables later (``NVTE_*``,
    ``TORCHINDUCTOR_CACHE_DIR``), and a parent forks nothing for a process whose imports would see other values."""
    return dict(_ENVIRONMENT)


def share() -> None:
    """Start a parent for the workers among which this process divides the tests; it imports for 5 s, and so would the
    parent of each of them."""
    os.environ[_SHARED] = str(_started()[0])


@functools.cache
def socket_path() -> str:
    """Where the parent listens; starts it, where no other process has."""
    given = os.environ.get(_SHARED) or os.environ.get(LISTENING)
    path, process = (Path(given), None) if given else _started()
    deadline_s = time.monotonic() + READY_S
    while not path.exists():
        ended = process is not None and process.poll() is not None
        assert not ended, f"the preloaded parent has ended: {path.with_name('log').read_text()}"
        assert time.monotonic() < deadline_s, "the preloaded parent is not ready"
        time.sleep(0.02)
    return str(path)


def _started() -> tuple[Path, subprocess.Popen[bytes]]:
    """Where a new parent will listen, and its process, which ends with this one."""
    folder = Path(tempfile.mkdtemp(prefix="preloaded-"))
    path = folder / "socket"
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "spare_megatron.launch.preloaded_parent", "--listen", str(path), *_IMPORTED],
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
    return path, process


@functools.cache
def _link() -> ParentLink:
    asked = [sys.executable, "-c", "import json, sys; print(json.dumps(sys.path))"]  # that of this process has more
    search_path = json.loads(subprocess.check_output(asked, cwd=ROOT, env=environment()))
    link = connect(Path(socket_path()), OF_A_JOB, search_path, environment())
    atexit.register(link.close)
    return link


def can_fork(environ: Mapping[str, str]) -> bool:
    """Whether a forked process with this environment would import as a new one."""
    return import_environment(environ) == import_environment(environment()) and "LD_PRELOAD" not in environ


def fork(command: Sequence[str], environ: Mapping[str, str], log: Path, directory: Path = ROOT) -> ForkedProcess:
    """Start ``command``, a script or ``-m`` and a module behind the interpreter, with its output in ``log``."""
    with open(os.devnull, "rb") as nothing, log.open("wb") as out:
        process = _link().start(command, environ, (nothing.fileno(), out.fileno(), out.fileno()), str(directory))
    process.release()
    return process


def fork_module(
    module: str, words: Sequence[str], environ: Mapping[str, str], log: Path, strict: bool = False
) -> ForkedProcess:
    """Start ``python -m MODULE`` (``strict``: with ``-W error``), with its output at the end of ``log``."""
    with open(os.devnull, "rb") as nothing, log.open("ab") as out:
        streams = (nothing.fileno(), out.fileno(), out.fileno())
        process = _link().start(_command(module, words, strict), environ, streams, str(ROOT))
    process.release()
    return process


def _command(module: str, words: Sequence[str], strict: bool = False) -> list[str]:
    return [sys.executable, "-m", "tests.forked", *(["--strict"] if strict else []), module, *words]


def warnings_are_errors() -> None:
    """In a forked process what ``-W error`` does in a new one, but for warnings that an import, which the preloaded
    parent has made, excludes by their text."""
    known = [one for one in warnings.filters if one[1] is not None]
    warnings.simplefilter("error")
    warnings.filters[:0] = known  # type: ignore[index]  # a list, whatever its stub says


class PipedProcess:
    """A forked ``python -m MODULE``, and pipes of text to and from it."""

    def __init__(self, module: str, words: Sequence[str], environ: Mapping[str, str]) -> None:
        ends = [os.pipe() for _ in range(3)]
        (asked, reported, failed), mine = [ends[0][0], ends[1][1], ends[2][1]], [ends[0][1], ends[1][0], ends[2][0]]
        self.process = _link().start(_command(module, words), environ, (asked, reported, failed), str(ROOT))
        self.process.release()
        for fd in (asked, reported, failed):
            os.close(fd)
        self.pid = self.process.pid
        self.stdin: TextIO = os.fdopen(mine[0], "w")
        self.stdout: TextIO = os.fdopen(mine[1])
        self.stderr: TextIO = os.fdopen(mine[2])

    def poll(self) -> int | None:
        """As that of Popen."""
        return self.process.poll()

    def wait(self, timeout: float | None = None) -> int:
        """As that of Popen."""
        return self.process.wait(timeout)

    def kill(self) -> None:
        """As that of Popen."""
        self.process.kill()

    def send_signal(self, number: int) -> None:
        """As that of Popen."""
        self.process.send_signal(number)

    def close(self) -> None:
        """Wait for its end, and close the pipes."""
        self.wait()
        for pipe in (self.stdin, self.stdout, self.stderr):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
