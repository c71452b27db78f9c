"""The fuzzers of converted models, for some seconds each, and for two minutes with --full. A process of its own lets a
fuzzer have alarms, and transformers without megatron-core's warnings as errors."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from tests.spawn import ROOT, environment

pytest.importorskip("transformers")
pytestmark = [pytest.mark.timeout(400)]

NAMES = ("safetensors_bytes", "hf_configs")


def findings(name: str, seed: int, minutes: float) -> str:
    """What a fuzzer prints; AssertionError where it finds something."""
    command = [sys.executable, "-m", f"tests.fuzz.{name}", "--seed", str(seed), "--minutes", str(minutes)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    return done.stdout


@pytest.mark.parametrize("name", [NAMES[0], pytest.param(NAMES[1], marks=pytest.mark.full)])  # it makes 16 models first
def test_some_seconds_find_nothing(name: str) -> None:
    text = findings(name, 7, 0.02)
    assert "accepted" in text
    assert "refused" in text


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_two_minutes_find_nothing(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = findings(name, int(time.time()) // 86400, 2.0)  # another seed each day; it is in the text
    with capsys.disabled():
        print(f"\n{text.splitlines()[-1]}")
