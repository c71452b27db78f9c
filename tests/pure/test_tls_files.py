"""The TLS files that a job makes for itself, and what is said of files that cannot serve."""

from __future__ import annotations

import datetime
import stat
from pathlib import Path

import pytest

from spare_megatron.config.errors import ConfigError
from spare_megatron.control_plane import tls_files
from spare_megatron.control_plane.tls_files import NO_TLS, TLS_FILES, check_tls, is_loopback, make_tls, tls_of


def test_a_job_makes_its_files_once_and_for_itself_alone(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert tls_of(run_dir, "") == ""
    make_tls(run_dir)
    directory = tls_of(run_dir, "")
    assert directory == str(run_dir / "tls")
    check_tls(directory)
    texts = {name: (Path(directory) / name).read_bytes() for name in TLS_FILES}
    make_tls(run_dir)
    assert texts == {name: (Path(directory) / name).read_bytes() for name in TLS_FILES}
    assert [path.name for path in run_dir.iterdir()] == ["tls"]
    assert stat.S_IMODE((run_dir / "tls").stat().st_mode) == 0o700
    assert {stat.S_IMODE((run_dir / "tls" / name).stat().st_mode) for name in TLS_FILES} == {0o600}
    assert tls_of(run_dir, NO_TLS) == ""
    assert tls_of(run_dir, "/given") == "/given"


def test_a_directory_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"the files for TLS cannot be made in .*: ENOTDIR"):
        make_tls(tmp_path / "file" / "run")


def _pair(path: Path) -> tuple[Path, Path]:
    for name in ("a", "b"):
        make_tls(path / name)
    return path / "a" / "tls", path / "b" / "tls"


def test_what_cannot_serve_is_said_with_the_file(tmp_path: Path) -> None:
    one, other = _pair(tmp_path)
    (one / "key.pem").write_bytes((other / "key.pem").read_bytes())
    with pytest.raises(ConfigError, match=r"key\.pem in .* is not the key of cert\.pem; give another --tls-dir"):
        check_tls(str(one))
    (one / "cert.pem").write_bytes((other / "cert.pem").read_bytes())
    with pytest.raises(ConfigError, match=r"cert\.pem in .* is not signed by its ca\.pem"):
        check_tls(str(one))
    (one / "cert.pem").write_text("-----BEGIN CERTIFICATE-----\nnonsense\n-----END CERTIFICATE-----\n")
    with pytest.raises(ConfigError, match=r"cert\.pem cannot be used: "):
        check_tls(str(one))
    (one / "cert.pem").unlink()
    with pytest.raises(ConfigError, match=r"cert\.pem is not in the TLS directory .*; it needs ca\.pem, cert\.pem"):
        check_tls(str(one))


@pytest.mark.parametrize("days", [-5, 5000])
def test_another_time_than_that_of_the_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, days: int) -> None:
    one, _ = _pair(tmp_path)
    now = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
    monkeypatch.setattr(tls_files, "_now", lambda: now)
    with pytest.raises(ConfigError, match=rf"is valid from .* to .*, and this host's date is {now:%Y-%m-%d}"):
        check_tls(str(one))


def test_another_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(tls_files, "TLS_NAME", "another")
        make_tls(tmp_path)
    with pytest.raises(ConfigError, match=r"is for \['another'\], and must be for spare-megatron"):
        check_tls(str(tmp_path / "tls"))


@pytest.mark.parametrize(
    ("listen", "alone"),
    [("127.0.0.1:0", True), ("localhost:7", True), ("[::1]:0", True), ("0.0.0.0:0", False), ("node7:1", False)],
)
def test_who_else_reaches_an_address(listen: str, alone: bool) -> None:
    assert is_loopback(listen) is alone
