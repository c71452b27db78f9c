"""Start a few processes for a test, hand each its arguments, collect what each returns, leave none behind.

A test names a function as ``package.module:function``; every process calls it as ``function(rank, store, arguments)``
and returns something JSON can hold. The store is a TCPStore of the test's own process, so no port is fixed.
They are forked by a parent that has torch and megatron-core (:mod:`tests.preloaded`), so a start takes milliseconds.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from spare_megatron.launch.preload_client import ForkedProcess
from tests import preloaded

ROOT = Path(__file__).resolve().parent.parent
_POLL_S = 0.05
_LOG_CHARS = 4000


def environment() -> dict[str, str]:
    """Environment for a test's processes: one thread each, no torch.compile, this checkout first on the path."""
    return {**preloaded.environment(), "TORCHDYNAMO_DISABLE": "1"}


@contextlib.contextmanager
def ranks(target: str, arguments: Sequence[Any], directory: Path) -> Iterator[list[ForkedProcess]]:
    """Processes that run ``target``, one for each entry of ``arguments``; killed by pid when the block is left."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes: list[ForkedProcess] = []
    try:
        for rank, argument in enumerate(arguments):
            task = {"target": target, "rank": rank, "port": store.port, "arguments": argument}
            (directory / f"task{rank}.json").write_text(json.dumps(task))
            words, log = (str(directory), str(rank)), directory / f"rank{rank}.log"
            processes.append(preloaded.fork_module("tests.spawn", words, environment(), log, strict=True))
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        del store


def run_ranks(target: str, arguments: Sequence[Any], timeout_s: float = 240.0) -> list[Any]:
    """What ``target`` returned on each rank; AssertionError with the log when a rank fails or the time is over."""
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        directory = Path(name)
        with ranks(target, arguments, directory) as processes:
            deadline = time.monotonic() + timeout_s
            while any(process.poll() is None for process in processes):
                failed = [rank for rank, process in enumerate(processes) if process.poll() not in (None, 0)]
                assert not failed, _report(directory, failed, "failed")
                late = [rank for rank, process in enumerate(processes) if process.poll() is None]
                assert time.monotonic() < deadline, _report(directory, late, f"did not end in {timeout_s} s")
                time.sleep(_POLL_S)
            failed = [rank for rank, process in enumerate(processes) if process.returncode]
            assert not failed, _report(directory, failed, "failed")
        return [json.loads((directory / f"result{rank}.json").read_text()) for rank in range(len(arguments))]


def _report(directory: Path, which: Sequence[int], what: str) -> str:
    logs = [(directory / f"rank{rank}.log").read_text(errors="replace") for rank in which[:2]]
    logs = [re.sub(r"^(\[rank\d+\]: )+", "", log, flags=re.MULTILINE)[-_LOG_CHARS:] for log in logs]
    return f"ranks {list(which)} {what}:\n" + "\n----\n".join(logs)


def _main(directory: Path, rank: int) -> None:
    from torch.distributed import TCPStore

    task = json.loads((directory / f"task{rank}.json").read_text())
    module, _, function = task["target"].partition(":")
    run = getattr(importlib.import_module(module), function)
    store = TCPStore("127.0.0.1", task["port"], is_master=False)
    result = run(task["rank"], store, task["arguments"])
    (directory / f"result{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]))
