"""Limits of file descriptors are raised, and a job that does not fit into them is notified."""

from __future__ import annotations

import asyncio
import errno
import subprocess
import sys
from pathlib import Path

from spare_megatron.runtime.descriptors import GROWN, watch_descriptors
from spare_megatron.runtime.disk import words

CODE = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (256, {hard}))
from spare_megatron.config.errors import ConfigError
from spare_megatron.runtime.descriptors import OF_A_GROUP, check_descriptors
try:
    check_descriptors(OF_A_GROUP * 1000, "the coordinator of 1000 groups")
except ConfigError as error:
    print(error)
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


def _reported(hard: int) -> list[str]:
    code = CODE.format(hard=hard)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()


def test_the_soft_limit_is_raised_to_the_hard_one() -> None:
    assert _reported(4500) == ["4500"]


def test_a_job_that_does_not_fit_is_given_what_it_needs() -> None:
    sentence, limit = _reported(1024)
    assert limit == "1024"
    assert sentence.startswith(
        "the coordinator of 1000 groups needs 4256 file descriptors, and the hard limit of this process is 1024; raise"
    )


def test_running_out_is_said_as_that() -> None:
    assert words(OSError(errno.EMFILE, "Too many open files")) == (
        "EMFILE (Too many open files; raise the limit: ulimit -n)"
    )


def test_a_process_that_has_many_more_than_before_says_so_once(tmp_path: Path) -> None:
    reported: list[str] = []

    async def main() -> None:
        watching = asyncio.create_task(watch_descriptors("rank 1 of group 2", reported.append, 0.02))
        await asyncio.sleep(0.1)
        assert reported == []
        files = [(tmp_path / "file").open("w") for _ in range(GROWN + 10)]
        await asyncio.sleep(0.2)
        for file in files:
            file.close()
        watching.cancel()

    asyncio.run(main())
    (line,) = reported
    assert line.startswith("WARNING: rank 1 of group 2 has ")
    assert f"{GROWN + 10} more than before" in line
