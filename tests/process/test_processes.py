"""What spare-launch starts leads a process group of its own, but no session."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from spare_megatron.launch.processes import Child, Processes
from tests.process.running import has_not_ended


def test_a_process_stays_in_the_session_and_is_killed_with_what_it_started(tmp_path: Path) -> None:
    """In a session of its own the control threads of a rank would wait for its share of a processor."""
    code = "import subprocess, time; print(subprocess.Popen(['sleep', '1000']).pid, flush=True); time.sleep(1000)"

    async def run() -> tuple[int, int, int]:
        ended: asyncio.Queue[Child] = asyncio.Queue()
        with Processes() as processes:
            out = tmp_path / "out"
            child = processes.start("one", [sys.executable, "-c", code], os.environ, out, ended=ended.put_nowait)
            while not out.read_text().endswith("\n"):
                await asyncio.sleep(0.01)
            started = int(out.read_text())
            found = os.getsid(child.pid), os.getpgid(child.pid) - child.pid, os.getpgid(started) - child.pid
            os.kill(child.pid, 9)
            assert (await asyncio.wait_for(ended.get(), 30.0)).status == -9
            while has_not_ended(started):
                await asyncio.sleep(0.01)
            return found

    assert asyncio.run(run()) == (os.getsid(0), 0, 0)
