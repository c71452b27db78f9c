"""The command that brings the data of a shard to a host: its words, its failures, and ranks that run it at once."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from spare_megatron.worker.job_loaders import StagingError, bring


def test_the_command_is_notified_shard_and_host(tmp_path: Path) -> None:
    bring(f"echo '{{shard}} {{host}} {{}}' > {tmp_path}/told", 7, tmp_path / "locks", 30.0)
    assert (tmp_path / "told").read_text() == f"7 {socket.gethostname()} {{}}\n"


@pytest.mark.parametrize(
    ("command", "limit_s", "ending"),
    [
        ("echo first; echo last {shard} >&2; exit 3", 30.0, "exit code 3: last 4"),
        ("echo begun {shard}; sleep 60", 0.5, "not done within 0.5 s: begun 4"),
        ("exit 1 # {shard}", 30.0, "exit code 1"),
    ],
)
def test_a_command_that_fails_is_notified_with_its_last_line(
    tmp_path: Path, command: str, limit_s: float, ending: str
) -> None:
    with pytest.raises(StagingError) as reported:
        bring(command, 4, tmp_path, limit_s)
    assert str(reported.value) == f"--spare-stage-command for shard 4 on {socket.gethostname()}: {ending}"


def test_ranks_of_one_host_run_it_one_after_the_other(tmp_path: Path) -> None:
    """Each leaves a mark while it runs, and fails where one is there."""
    mark, log = tmp_path / "mark", tmp_path / "log"
    command = f"set -C; echo {{shard}} > {mark} && sleep 0.1 && rm {mark} && echo >> {log}"
    failed: list[Exception] = []

    def run() -> None:
        try:
            bring(command, 1, tmp_path / "locks", 30.0)
        except StagingError as error:
            failed.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert log.read_text() == "\n" * 4
