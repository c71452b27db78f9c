"""Draws all pictures of README.md and docs/ anew: screenshots of a real run, and plots of benchmarks/results.

    python benchmarks/pictures.py [--plots-only]

The run is a small GPT on 4 groups of one rank with its checkpoints. One group is killed and comes back; from then on
another computes at a third of its speed, and gives pieces to the others. The page is shown while it trains, the report
when it was stopped. The plots are those of reproduce_spare.py and rebuild_sweep.py, from the files that these wrote.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from PIL import Image
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import rebuild_sweep, reproduce_spare
from benchmarks._report import RESULTS
from spare_megatron.cli.status_screen import screen
from spare_megatron.monitor.html_report import report_html
from spare_megatron.monitor.run_files import RunFiles
from spare_megatron.monitor.speed_texts import speed_lines
from spare_megatron.runtime.run_directory import RunDirectory, glance
from tests.process.chromium import chromium, missing
from tests.process.page_process import PageProcess

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
NAME = "runs/gpt"
GROUPS, KILLED, SLOW = 4, 2, 1
FAULTS = (f"sigkill:group={KILLED},step=12,at=reduce", f"slow=3x:group={SLOW},step=20")
FLAGS = (
    *("--num-layers", "4", "--hidden-size", "128", "--num-attention-heads", "4", "--seq-length", "128"),
    *("--max-position-embeddings", "128", "--micro-batch-size", "1", "--global-batch-size", "32", "--lr", "2e-3"),
    *("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "1023", "--split", "100,0,0"),
    *("--eval-iters", "0", "--num-workers", "0", "--train-iters", "400", "--save-interval", "10"),
    *("--spare-redundancy", "3", "--spare-schedule", "tickets", "--spare-relief", "--spare-max-group-restarts", "3"),
)
COLOURS = 255
WIDE, PHONE = (1280, 1000), (390, 844)
PATIENCE_S = 900.0
TERMINAL = (
    "<pre style='display:inline-block;padding:1rem;margin:0;background:#14161a;color:#e7e7e4;font:14px/1.35 monospace'>"
)


def main() -> None:
    """Draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plots-only", action="store_true", help="no run, no browser")
    options = parser.parse_args()
    for module, name in ((reproduce_spare, "reproduce_spare"), (rebuild_sweep, "rebuild_sweep")):
        rows = json.loads((RESULTS / f"{name}.json").read_text())["results"]
        module.plot(rows, DOCS / f"{name}.png")
    if options.plots_only:
        return
    if missing():
        sys.exit(missing())
    with tempfile.TemporaryDirectory() as scratch, chromium() as browser:
        _screenshots(Path(scratch), browser)


def _screenshots(path: Path, browser: Any) -> None:
    run_dir = RunDirectory(path / NAME)
    process = _launched(path)
    try:
        _wait(process, "the return", lambda: _happened(run_dir))
        with PageProcess(run_dir.path) as page:
            browser.get(page.url)
            _emulate(browser, WIDE, "light")
            cell = f"return document.querySelectorAll('.cells i')[{SLOW}].classList.contains('slow')"
            _wait(process, "the slow group", lambda: browser.execute_script(cell))
            _shoot(browser, DOCS / "page.png")
            _emulate(browser, PHONE, "dark")
            _shoot(browser, DOCS / "page_phone.png")
        _emulate(browser, WIDE, "light")
        _wait(process, "the slow group", lambda: any(f"group {SLOW} is at" in line for line in _lines(run_dir)))
        _shoot_terminal(browser, run_dir, path / "status.html")
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE_S)
        report = path / "report.html"
        report.write_text(report_html(RunFiles(run_dir).look(), NAME))
        browser.get(report.as_uri())
        _shoot(browser, DOCS / "report.png", height=WIDE[1])
    finally:
        process.terminate()
        process.wait(60)


def _launched(path: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "spare_megatron.cli.launch", "--num-groups", str(GROUPS)]
    command += ["--run-dir", NAME, *(word for fault in FAULTS for word in ("--inject", fault))]
    command += [str(ROOT / "pretrain_gpt.py"), *FLAGS, "--save", str(path / "save")]
    environment = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", TORCHDYNAMO_DISABLE="1")
    return subprocess.Popen(command, cwd=path, env=environment, stdout=subprocess.DEVNULL)


def _happened(run_dir: RunDirectory) -> bool:
    """Whether the killed group is back for some steps, and pieces of the slow one have moved."""
    status = glance(run_dir.status) or {}
    history = RunFiles(run_dir).look().history if status else None
    if history is None or not history.returns:
        return False
    return bool(status["relieved"]) and status["step"] >= history.returns[-1].step + 10


def _lines(run_dir: RunDirectory) -> Iterator[str]:
    """What is said of slow groups."""
    return speed_lines(glance(run_dir.status) or {"phase": ""})


def _wait(process: subprocess.Popen[bytes], what: str, holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not holds():
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise SystemExit(f"{what} did not come")
        time.sleep(0.5)


def _emulate(browser: Any, size: tuple[int, int], scheme: str) -> None:
    width, height = size
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.execute_cdp_cmd("Emulation.setScrollbarsHidden", {"hidden": True})
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    time.sleep(1.0)  # it is drawn


def _shoot(browser: Any, path: Path, height: int = 0) -> None:
    """The whole page, or its upper end."""
    size = browser.execute_cdp_cmd("Page.getLayoutMetrics", {})["cssContentSize"]
    clip = {"x": 0, "y": 0, "width": size["width"], "height": height or size["height"], "scale": 1}
    shot = browser.execute_cdp_cmd("Page.captureScreenshot", {"clip": clip, "captureBeyondViewport": True})
    _keep(base64.b64decode(shot["data"]), path)


def _shoot_terminal(browser: Any, run_dir: RunDirectory, scratch: Path) -> None:
    """What spare-status --watch shows."""
    console = Console(record=True, width=120, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
    files = RunFiles(run_dir)
    console.print(screen(files.look(), files.now_s()))
    scratch.write_text(f"<body style='margin:0'>{TERMINAL}{console.export_html(code_format='{code}')}</pre>")
    browser.get(scratch.as_uri())
    _keep(browser.find_element("css selector", "pre").screenshot_as_png, DOCS / "status.png")


def _keep(png: bytes, path: Path) -> None:
    """Write a picture with few colours: a third of its size."""
    Image.open(io.BytesIO(png)).convert("RGB").quantize(COLOURS).save(path, optimize=True)


if __name__ == "__main__":
    main()
