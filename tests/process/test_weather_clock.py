"""The clock that benchmarks/soak.py --weather gives to single processes."""

from __future__ import annotations

import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks._weather import build_clock

CODE = """
import os, sys, time
from pathlib import Path
print(time.time(), time.monotonic(), flush=True)
sys.stdin.readline()
print(time.time(), time.monotonic(), flush=True)
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs the C compiler cc")
def test_only_the_wall_clock_of_one_process_jumps(tmp_path: Path) -> None:
    clocks = tmp_path / "clocks"
    clocks.mkdir()
    environment = {"SPARE_CLOCKS": str(clocks), "LD_PRELOAD": str(build_clock(tmp_path))}
    with subprocess.Popen(
        [sys.executable, "-c", CODE], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        wall, steady = map(float, child.stdout.readline().split())
        (clocks / str(child.pid)).write_bytes(struct.pack("d", 86400.0))
        child.stdin.write("\n")
        child.stdin.flush()
        later_wall, later_steady = map(float, child.stdout.readline().split())
    assert child.returncode == 0
    passed = later_steady - steady
    assert 0 <= passed < 60
    assert later_wall - wall == pytest.approx(86400.0 + passed, abs=1.0)
