"""What killed processes leave in the run directory is removed, and nothing else."""

from __future__ import annotations

from pathlib import Path

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
