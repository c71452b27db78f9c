"""Compares the commit round, the step and the masked kill of this checkout with another checkout's, by paired ratios.

    python benchmarks/against_checkout.py ../other-checkout [--turns 20] [--step-turns 12] [--kill-rounds 4]

Both checkouts run their own code with this one's Python. The commit round (4 groups of 2 ranks without a model, as in
``control_plane.py``) and the step (of ``step_overhead.py``'s model, 2 groups x PP2 and 4 groups of one rank, fp32 and
exact sums) run in turns: both jobs are alive, one runs for some steps while every process of the other is stopped, and
the order alternates, so that drift of the machine affects both alike. Two jobs of equal code differ by what their
processes are like (addresses, hash seeds), so the jobs are started again ``--starts`` times. CPU time is counted to the
nanosecond. A masked kill is that of ``masked_failure.py``: CPU time of a whole job of 4 groups x PP2 in which three
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
from step_overhead import model

ROOT = Path(__file__).resolve().parents[1]
Pair = tuple[dict[str, float], dict[str, float]]
ROUND_STEPS, STEP_STEPS = 400, 6
STEP_CASES = {
    "2 groups x PP2": (2, ("--pipeline-model-parallel-size", "2", "--global-batch-size", "16")),
    "4 groups": (4, ("--global-batch-size", "32")),
}
STEP_MODES = {"fp32": ("--spare-reduce", "fp32"), "exact": ("--spare-reduce", "exact")}
TURNS = """
import json, os, signal, sys, tempfile, time
from pathlib import Path
import psutil
{start}

def whole():
    roots = [psutil.Process(pid) for pid in pids()]
    return [*roots, *(child for root in roots for child in root.children(recursive=True))]

def send(number):
    for process in whole():
        process.send_signal(number)

def cpu_s(process):  # to the nanosecond; psutil has ticks of 10 ms
    tasks = Path(f"/proc/{{process.pid}}/task").glob("*/schedstat")
    return sum(int(path.read_text().split()[0]) for path in tasks) / 1e9

def until(count):
    deadline_s = time.monotonic() + 300
    while steps() < count:
        if time.monotonic() > deadline_s:
            raise SystemExit(f"{{steps()}} steps, not {{count}}")
        time.sleep(0.002)

try:
    until({warm_up})
    send(signal.SIGSTOP)
    print("ready", flush=True)
    for line in sys.stdin:
        processes, first, began_s = whole(), steps(), time.perf_counter()
        before = [cpu_s(process) for process in processes]
        send(signal.SIGCONT)
        until(first + int(line))
        send(signal.SIGSTOP)
        used = [after - cpu for cpu, after in zip(before, map(cpu_s, processes), strict=True)]
        done = steps() - first
        found = dict(part(processes, used), all_ms=sum(used), wall_ms=time.perf_counter() - began_s)
        print(json.dumps({{name: 1e3 * value / done for name, value in found.items()}}), flush=True)
finally:
    close()
"""
ROUND = """
from tests.process.control_job import ControlJob
FLAGS = "--steps 1000000 --piece-s 0.002 --pieces 2 --heartbeat-timeout-s 50 --progress-timeout-s 300"
scratch = tempfile.TemporaryDirectory()
job = ControlJob(Path(scratch.name), 4, 2, FLAGS)
job.start()

def pids():
    return [job.coordinator.pid, *(rank.pid for rank in job.ranks.values())]

def part(processes, used):
    return {"coordinator_ms": used[0], "ranks_ms": sum(used[1:])}

def steps():  # committed() reads the whole file
    try:
        with job.run_dir.metrics.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - 8192))
            return json.loads(file.read().splitlines(True)[-2])["step"]
    except (OSError, IndexError, ValueError):
        return 0

def close():
    for process in whole():
        process.kill()
    job.close()
    scratch.cleanup()
"""
STEP = """
import subprocess
scratch = tempfile.TemporaryDirectory()
record = Path(scratch.name) / "run" / "metrics.jsonl"
words = [sys.executable, "-m", "spare_megatron.cli.launch", "--run-dir", str(record.parent), *{words!r}]
environ = dict(os.environ, PYTHONPATH=os.getcwd(), OMP_NUM_THREADS="1", TORCHDYNAMO_DISABLE="1", SPARE_PRELOADED="")
job = subprocess.Popen(words, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

def pids():
    return [job.pid]

def part(processes, used):
    return {{}}

def steps():
    return record.read_bytes().count(b"\\n") if record.exists() else 0

def close():
    for process in whole():
        process.kill()
    job.wait()
    scratch.cleanup()
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


def turned(other: Path, code: str, turns: int, steps: int) -> list[Pair]:
    """The figures of each turn (this, other) of two jobs, of which one runs while the other is stopped."""
    jobs = {}
    try:
        for checkout in (ROOT, other):
            jobs[checkout] = subprocess.Popen(
                [sys.executable, "-c", code], cwd=checkout, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            _answer(jobs[checkout])
        found = []
        for turn in range(turns + 1):
            order = (ROOT, other) if turn % 2 else (other, ROOT)
            results = {}
            for checkout in order:
                stdin = jobs[checkout].stdin
                assert stdin is not None
                stdin.write(f"{steps}\n")
                stdin.flush()
                results[checkout] = json.loads(_answer(jobs[checkout]))
            found.append((results[ROOT], results[other]))
        return found[1:]
    finally:
        for job in jobs.values():
            job.communicate(timeout=60)


def _answer(job: subprocess.Popen[str]) -> str:
    assert job.stdout is not None
    line = job.stdout.readline()
    if not line:
        raise RuntimeError("a checkout's job has ended, as it said above")
    return line


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
    parser.add_argument("--turns", type=int, default=20, help="number of turns of a commit round (default: 20)")
    parser.add_argument("--step-turns", type=int, default=12, help="number of turns of each step (default: 12)")
    parser.add_argument("--starts", type=int, default=2, help="number of times that the jobs are started (default: 2)")
    parser.add_argument(
        "--kill-rounds", type=int, default=4, help="number of pairs of jobs with three kills (default: 4)"
    )
    parser.add_argument("--json", type=Path, help="file to write the result to")
    options = parser.parse_args()
    other = options.other.resolve()
    table: list[dict[str, object]] = []
    codes = {"commit round": (TURNS.format(start=ROUND, warm_up=200), options.turns, ROUND_STEPS)}
    for case, (groups, flags) in STEP_CASES.items():
        for mode, more in STEP_MODES.items():
            train = (*model(), *flags, *more, "--train-iters", "100000", "--spare-heartbeat-timeout-s", "600")
            start = STEP.format(words=["--num-groups", str(groups), "pretrain_gpt.py", *train])
            codes[f"step, {case}, {mode}"] = (TURNS.format(start=start, warm_up=4), options.step_turns, STEP_STEPS)
    for what, (code, turns, steps) in codes.items():
        found = [pair for _ in range(options.starts) for pair in turned(other, code, turns, steps)] if turns else []
        if found:
            table += rows(what, found, tuple(found[0][0]))
            sys.stderr.write(f"{what}: {table[-2]}\n")
    kills = pairs(other, [KILL.format(seed=seed) for seed in range(options.kill_rounds)])
    if kills:
        table += rows("masked kill", kills, ("job_cpu_s", "total_s", "agree_s", "rebuild_s", "reduce_s"))
    names = {"this": ROOT, "other": other}
    heads = {
        name: subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=path, capture_output=True, text=True
        ).stdout.strip()
        for name, path in names.items()
    }
    report(
        "against_checkout",
        {**heads, **{name: getattr(options, name) for name in ("turns", "step_turns", "starts", "kill_rounds")}},
        table,
        options.json,
    )


if __name__ == "__main__":
    main()
