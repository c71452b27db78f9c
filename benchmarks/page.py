"""Measures how soon spare-page shows what happens in a job, and what it needs.

    python benchmarks/page.py [--kills 12] [--steps 60]

A real job of 4 groups of one rank (the tests' small torch model) loses one group after the other to SIGKILL, and each
comes back: times are from the journal's record until an event says so, and until a browser (headless Chromium on the
same machine) has changed the group's cell. Then 1000 groups, whose journal, metrics and status are those of the
protocol machine, take a step each second and lose a group in every fourth: time from the arrival of an event in the
browser until it was drawn, and CPU time and memory of the page's process while the browser and 8 others look on.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._report import report
from spare_megatron.config.exits import ExitCode
from spare_megatron.monitor.run_files import RunFiles
from spare_megatron.runtime.run_directory import RunDirectory
from tests.polling import until
from tests.process.chromium import chromium, missing
from tests.process.harness import launch
from tests.process.page_process import Onlooker, PageProcess
from tests.process.thousand_groups import one_more_step, thousand_groups

GROUPS, LOOKERS = 4, 8
WORDS = ("--steps", "100000", "--pieces", "1", "--piece-s", "0.25", "--redundancy", "3")
RESTARTS = ("--spare-max-group-restarts", "100", "--spare-group-restart-pause-s", "0")
WATCH = """
  window.changed = [];
  for (const cell of document.querySelectorAll(".cells i"))
    new MutationObserver(() => changed.push([Date.now() / 1000, +cell.dataset.group, cell.className.split(" ")[0]]))
      .observe(cell, { attributes: true, attributeFilter: ["class"] });
"""


def main() -> None:
    """Print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    if missing():
        sys.exit(missing())
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        rows = shown_after(Path(folder), browser, args.kills)
        (Path(folder) / "thousand").mkdir()
        rows += needed(Path(folder) / "thousand", browser, args.steps)
    report("page", {"kills": args.kills, "steps": args.steps, "onlookers": LOOKERS + 1}, rows)


def row(measured: str, unit: str, values: Sequence[float]) -> dict[str, object]:
    """A row of the table."""
    return {
        "measured": measured,
        "unit": unit,
        "median": round(statistics.median(values), 4),
        "max": round(max(values), 4),
        "number": len(values),
    }


def shown_after(path: Path, browser: Any, kills: int) -> list[dict[str, object]]:
    """From the journal to events and browser."""
    shown = path / "shown"  # the harness takes processes that name the run directory for the job's
    shown.symlink_to(path / "run")
    at_random = random.Random(1)
    job = launch(path / "run", *WORDS, *RESTARTS, groups=GROUPS, group_size=1)
    with contextlib.ExitStack() as stack:
        stack.callback(job.end)
        job.wait_for_step(1)
        page = stack.enter_context(PageProcess(shown))
        browser.get(page.url)
        cells = "return document.querySelectorAll('.cells .live').length"
        until("cells", lambda: browser.execute_script(cells) == GROUPS)
        browser.execute_script(WATCH)
        looker = Onlooker(page)
        stack.callback(looker.close)
        for kill in range(kills):
            job.kill(*job.pids(kill % GROUPS))
            until("the return", lambda number=kill: len(looker.reported("return")) > number, timeout_s=120.0)
            time.sleep(at_random.uniform(1.0, 2.0))  # the page looks at regular times
        changed = browser.execute_script("return changed")
        job.kill(job.process.pid, number=signal.SIGTERM)
        job.finish(code=ExitCode.REQUEUE)
    history = RunFiles(RunDirectory(job.run_dir)).look().history
    reported = [
        (at_s, int(group), cell[0]) for at_s, one in looker.seen for group, cell in one.get("cells", {}).items()
    ]
    rows = []
    for what, happened in (
        ("loss", [(one.time_s, group) for one in history.failures for group in one.groups]),
        ("return", [(one.time_s, one.group) for one in history.returns]),
    ):
        states = ("live", "patching") if what == "return" else ("dead", "learning")
        for where, seen in (("event", reported), ("browser", changed)):
            after_s = [
                next(s for s, g, state in seen if g == group and s >= at_s and state in states) - at_s
                for at_s, group in happened
            ]
            rows.append(row(f"{what} to {where}", "s", after_s))
    return rows


def needed(path: Path, browser: Any, steps: int) -> list[dict[str, object]]:
    """What 1000 groups need."""
    written = thousand_groups(path)
    with contextlib.ExitStack() as stack:
        page = stack.enter_context(PageProcess(path))
        browser.get(page.url)
        for _ in range(LOOKERS):
            stack.callback(Onlooker(page).close)
        cells = "return document.querySelectorAll('.cells .live').length"
        until("cells", lambda: browser.execute_script(cells) == 1000)
        browser.execute_script("sparePage.drawMs.length = 0")
        cpu_s, began_s = page.cpu_s(), time.monotonic()
        for step in range(steps):
            one_more_step(written, *([7 * step] if step % 4 == 3 else []))
        cores = (page.cpu_s() - cpu_s) / (time.monotonic() - began_s)
        drawn_s = [took_ms / 1000 for took_ms in browser.execute_script("return sparePage.drawMs")]
        resident_mb = page.resident_mb()
    return [
        row("draw a change of 1000 groups", "s", drawn_s),
        row("CPU of the page's process", "cores", [cores]),
        row("memory of the page's process", "MB", [resident_mb]),
    ]


if __name__ == "__main__":
    main()
