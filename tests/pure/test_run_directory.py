"""What killed processes leave in the run directory is removed, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from spare_megatron.config.errors import ConfigError
from spare_megatron.runtime.run_directory import RunDirectory, scratch_of


def test_a_sweep_removes_what_is_half_written(tmp_path: Path) -> None:
    run_dir, kept = RunDirectory(tmp_path), {".metadata", ".status.json.another-host-1-1", "status.json", "leaders"}
    run_dir.sweep()
    (tmp_path / "leaders").mkdir()
    for name in kept - {"leaders"}:
        (tmp_path / name).touch()
    for path in (run_dir.status, run_dir.processes, tmp_path / "leaders" / "group-0.json"):
        scratch_of(path).touch()
    run_dir.sweep()
    assert {path.name for path in tmp_path.rglob("*")} == kept


def test_a_token_that_others_can_read_is_said_with_the_fix(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path)
    token = run_dir.token(create=True)
    assert not run_dir.notices.exists()
    (tmp_path / "token").chmod(0o644)
    assert run_dir.token() == token
    assert not run_dir.notices.exists(), "who made the job says it, not a thousand ranks"
    assert run_dir.token(create=True) == token
    (line,) = run_dir.notices.read_text().splitlines()
    assert f"others can read the job's token {tmp_path / 'token'} (mode 0644)" in line
    assert f"chmod 600 {tmp_path / 'token'}" in line


@pytest.mark.parametrize("left", [b"", b"\n", b"0123456789abcde", bytes(32), b"\xff" * 32])
def test_a_torn_token_is_none(tmp_path: Path, left: bytes) -> None:
    """An empty one would be equal to that of a caller who has none."""
    (tmp_path / "token").write_bytes(left)
    for create in (True, False):
        with pytest.raises(ConfigError, match=r"token is torn: it has \d+ characters, .*; remove it"):
            RunDirectory(tmp_path).token(create)


def test_a_lock_on_a_full_disk_is_held_without_a_name(tmp_path: Path) -> None:
    program = "\n".join(
        (
            "import resource, sys",
            "from spare_megatron.runtime.run_directory import RunDirectory",
            "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))",
            "lock = RunDirectory(sys.argv[1]).lock('launch', 'a job')",
            "print('held', flush=True)",
            "sys.stdin.read()",
            "lock.release()",
        )
    )
    words = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match="is in use by another process"):
            RunDirectory(tmp_path).lock("launch", "another job")
        holder.communicate()
    assert holder.returncode == 0
