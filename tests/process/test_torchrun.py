"""A whole job under torchrun: one for each group, which starts its group again when one of its ranks dies."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from spare_megatron.cli.drain import main
from spare_megatron.control_plane.channel import Security
from spare_megatron.launch.coordinator_client import CoordinatorClient
from spare_megatron.launch.preload_client import ForkedProcess
from spare_megatron.runtime.run_directory import RunDirectory, glance
from tests import preloaded
from tests.process.returning import voted_in

pytestmark = pytest.mark.timeout(240)
GROUPS, SIZE = 2, 2
TOY = ("tests/process/toy_train.py", "--steps", "100000", "--pieces", "2", "--piece-s", "0.25", "--redundancy", "2")


@pytest.fixture
def started(tmp_path: Path) -> Iterator[dict[str, ForkedProcess]]:
    """The coordinator and the torchruns by name, which the tests' parent forks; whatever happens, nothing is left
    of them."""
    environ = {**preloaded.environment(), "SPARE_RUN_DIR": str(tmp_path)}
    environ |= {"SPARE_GROUP_SIZE": str(SIZE), "SPARE_NUM_GROUPS": str(GROUPS)}
    commands: dict[str, tuple[str, ...]] = {
        "coordinator": ("spare_megatron.cli.coordinator", "--run-dir", str(tmp_path))
    }
    run = ("torch.distributed.run", "--standalone", "--nproc-per-node", str(SIZE), "--max-restarts", "2", *TOY)
    commands |= {f"group {group}": run for group in range(GROUPS)}
    found = {}
    for name, (module, *words) in commands.items():
        own = {**environ, "SPARE_GROUP": name.rpartition(" ")[2]} if name.startswith("group") else environ
        found[name] = preloaded.fork_module(module, words, own, tmp_path / f"{name}.out")
    try:
        yield found
    finally:
        for process in found.values():
            for child in [*psutil.Process(process.pid).children(recursive=True)] if process.poll() is None else []:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            process.kill()
            process.wait()


def until(what: str, true: Callable[[], bool], folder: Path, timeout_s: float = 120.0) -> None:
    """Poll until ``true()``."""
    deadline_s = time.monotonic() + timeout_s
    while not true():
        reported = "\n".join(path.read_text()[-2000:] for path in sorted(folder.glob("*.out")))
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s: {what}\n{reported}"
        time.sleep(0.1)


def ranks(torchrun: ForkedProcess) -> list[psutil.Process]:
    """The processes of a group, by position."""
    found = [child for child in psutil.Process(torchrun.pid).children() if "RANK" in child.environ()]
    return sorted(found, key=lambda child: int(child.environ()["RANK"]))


def test_torchrun_starts_its_group_again_but_for_one_that_is_drained(
    started: dict[str, ForkedProcess], tmp_path: Path
) -> None:
    run_dir = RunDirectory(tmp_path)

    def status() -> dict[str, Any]:
        return glance(run_dir.status) or {"live": {}, "step": 0}

    until("four steps", lambda: status()["step"] >= 4, tmp_path)
    ranks(started["group 1"])[1].send_signal(signal.SIGKILL)
    until("group 1 is back", lambda: status()["live"] == {"0": 0, "1": 1}, tmp_path)
    joined = status()["step"]
    until("steps of both", lambda: status()["step"] >= joined + 4, tmp_path)
    assert main([str(tmp_path), "--group", "1"]) == 0
    assert started["group 1"].wait(60) == 0
    until("a step of one", lambda: status()["step"] >= joined + 6, tmp_path)
    assert (status()["live"], status()["drained"]) == ({"0": 0}, [1])

    async def stop() -> None:
        client = CoordinatorClient(run_dir, Security(run_dir.token(), ""), lambda: False)
        client.request_stop("the test is over", lambda: None)
        while started["coordinator"].poll() is None:
            await asyncio.sleep(0.1)
        client.close()

    asyncio.run(asyncio.wait_for(stop(), 60.0))
    assert [process.wait(60) for name, process in started.items() if name != "coordinator"] == [0, 0]
    voted = voted_in(run_dir.journal)
    assert voted.keys() >= set(range(joined + 3))
    assert all(len(digests) == 1 for digests in voted.values())
