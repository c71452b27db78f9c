"""What a wheel is called and what is in it. Its libraries are made by a stand-in for the compiler, which is quick."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest

from spare_megatron import __version__

ROOT = Path(__file__).resolve().parents[2]
BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
COMPILER = "import pathlib, sys; pathlib.Path(sys.argv[sys.argv.index('-o') + 1]).touch()"


def wheel(folder: Path, compiler: str) -> Path:
    """The wheel that a compiler makes of a copy of this checkout."""
    source, made = folder / "source", folder / "wheels"
    shutil.copytree(ROOT / "spare_megatron", source / "spare_megatron", ignore=shutil.ignore_patterns("*.so", "__py*"))
    shutil.copytree(ROOT / "kernels", source / "kernels")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "THIRD_PARTY_NOTICES.md"):
        shutil.copy(ROOT / name, source)
    (source / "compiler.py").write_text(COMPILER)
    environ = {**os.environ, "CXX": compiler, "NVCC": "no-such-nvcc"}
    words = [sys.executable, "-W", "ignore", "-c", BUILD, str(made)]
    done = subprocess.run(words, cwd=source, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = made.iterdir()
    return path


@pytest.mark.parametrize(
    ("compiler", "platform", "libraries"),
    [
        (f"{sys.executable} compiler.py", sysconfig.get_platform().replace("-", "_").replace(".", "_"), 3),
        ("no-such-compiler", "any", 0),
    ],
    ids=["compiled", "plain"],
)
def test_a_wheel_is_for_every_python_and_has_all_files(
    tmp_path: Path, compiler: str, platform: str, libraries: int
) -> None:
    path = wheel(tmp_path, compiler)
    assert path.name == f"spare_megatron-{__version__}-py3-none-{platform}.whl"
    with ZipFile(path) as archive:
        names = archive.namelist()
        dist = f"spare_megatron-{__version__}.dist-info"
        metadata = archive.read(f"{dist}/METADATA").decode()
        scripts = archive.read(f"{dist}/entry_points.txt").decode()
    assert sum(name.endswith(".so") for name in names) == libraries
    files = (path for path in (ROOT / "spare_megatron").rglob("*") if path.is_file() and path.suffix != ".so")
    expected = {str(path.relative_to(ROOT)) for path in files if "__pycache__" not in path.parts}
    assert expected - set(names) == set()
    assert {f"{dist}/licenses/LICENSE", f"{dist}/licenses/THIRD_PARTY_NOTICES.md"} <= set(names)
    assert "\nLicense-Expression: Apache-2.0\n" in metadata
    commands = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert all(f"{name} = {place}\n" in scripts for name, place in commands.items())
