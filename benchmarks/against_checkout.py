"""Compares the commit round and the masked kill of this checkout with another checkout's, in turns, by paired ratios.

    python benchmarks/against_checkout.py ../other-checkout [--rounds 5] [--kill-rounds 4] [--json FILE]

Both checkouts run their own code with this one's Python. A commit round is that of ``control_plane.py`` (4 groups of 2
ranks without a model): CPU time per step of the coordinator, a leader and a rank, and the time until the last rank has
the commit. A masked kill is that of ``masked_failure.py``: CPU time of a whole job of 4 groups x PP2 in which three
groups are killed, start included, and the time from the signal to the commit. On a shared machine the ratio that counts
is that of CPU time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from _report import report

ROOT = Path(__file__).resolve().parents[1]
Pair = tuple[dict[str, float], dict[str, float]]
ROUND = """
import json
from pathlib import Path
from benchmarks import control_plane

def cpu_s(pid):  # to the nanosecond; psutil has ticks of 10 ms
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9

control_plane.cpu_s, control_plane.STEPS = cpu_s, 400
print(json.dumps(control_plane.measure(4, 2)))
"""
KILL = """
import json, random, resource, statistics, sys
sys.path.insert(0, "benchmarks")
import masked_failure
found = masked_failure._job(random.Random({seed}), 3)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
kills = {{name: statistics.median(one[name] for one in found) for name in found[0]}}
print(json.dumps({{**kills, "job_cpu_s": used.ru_utime + used.ru_stime}}))
"""


def run(checkout: Path, code: str) -> dict[str, float]:
    """Run a program in a checkout; returns the JSON of its last line."""
    done = subprocess.run([sys.executable, "-c", code], cwd=checkout, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"in {checkout}: {done.stderr[-2000:]}")
    plain: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return plain


def pairs(other: Path, codes: list[str]) -> list[Pair]:
    """The results (this, other) of each program; which checkout runs first alternates."""
    found = []
    for turn, code in enumerate(codes):
        order = (ROOT, other) if turn % 2 else (other, ROOT)
        results = {checkout: run(checkout, code) for checkout in order}
        found.append((results[ROOT], results[other]))
        sys.stderr.write(f"{turn + 1} of {len(codes)}\n")
    return found


def rows(what: str, found: list[Pair], names: tuple[str, ...]) -> list[dict[str, object]]:
    """One row of the table for each figure."""
    table: list[dict[str, object]] = []
    for name in names:
        ratios = sorted(this[name] / max(other[name], 1e-9) for this, other in found)
        quarter = len(ratios) // 4
        table.append(
            {
                "what": what,
                "figure": name,
                "this_median": round(statistics.median(this[name] for this, _ in found), 5),
                "other_median": round(statistics.median(other[name] for _, other in found), 5),
                "ratio_median": round(statistics.median(ratios), 3),
                "ratio_quarter": round(ratios[quarter], 3),
                "ratio_three_quarters": round(ratios[-1 - quarter], 3),
            }
        )
    return table


def main() -> None:
    """Print the table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="the other checkout, with its kernels built")
    parser.add_argument("--rounds", type=int, default=5, help="number of pairs of jobs without a model (default: 5)")
    parser.add_argument(
        "--kill-rounds", type=int, default=4, help="number of pairs of jobs with three kills (default: 4)"
    )
    parser.add_argument("--json", type=Path, help="file to write the result to")
    options = parser.parse_args()
    other = options.other.resolve()
    commits = pairs(other, [ROUND] * options.rounds)
    kills = pairs(other, [KILL.format(seed=seed) for seed in range(options.kill_rounds)])
    round_figures = ("coordinator_cpu_ms", "leader_cpu_ms", "rank_cpu_ms", "last_rank_ms_median")
    table = rows("commit round", commits, round_figures) if commits else []
    table += rows("masked kill", kills, ("job_cpu_s", "total_s", "agree_s", "rebuild_s", "reduce_s")) if kills else []
    names = {"this": ROOT, "other": other}
    heads = {
        name: subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=path, capture_output=True, text=True
        ).stdout.strip()
        for name, path in names.items()
    }
    report(
        "against_checkout", {**heads, "rounds": options.rounds, "kill_rounds": options.kill_rounds}, table, options.json
    )


if __name__ == "__main__":
    main()
