"""Runs the simulated trials of a benchmark, which can be interrupted: finished trials are kept in a file, one per line.

The key of a line is the whole case and its seed, so a result is never used for another case. The file must be removed
when the simulator itself changes.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from spare_megatron.simulator.policy_trial import TrialCounts, TrialResult
from spare_megatron.simulator.trials import Case, run_many

Job = tuple[Case, int]
REPORTED_EVERY = 10
"""Trials."""


class Trials:
    """The outcomes of trials by (case, seed), from a file and from runs."""

    def __init__(self, path: Path | None, workers: int | None = None) -> None:
        self._path, self._workers = path, workers
        self._known: dict[str, TrialResult] = {}
        self.cpu_s = 0.0
        """CPU seconds of all trials, with those of earlier runs."""
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                found = json.loads(line)
                self._known[found["key"]] = _outcome(found["outcome"])
                self.cpu_s += found["cpu_s"]

    def run(self, jobs: Iterable[Job], limit_s: float | None = None) -> bool:
        """Run the trials that are not known yet, a few at a time, and print progress. False when the time limit was
        reached before all were run."""
        missing = list({_key(job): job for job in jobs if _key(job) not in self._known}.values())
        size = self._workers or len(os.sched_getaffinity(0))
        began = time.perf_counter()
        for start in range(0, len(missing), size):
            if limit_s is not None and time.perf_counter() - began > limit_s:
                return False
            part = missing[start : start + size]
            before = _cpu_s()
            outcomes = run_many(part, self._workers)
            cpu_s = _cpu_s() - before
            self.cpu_s += cpu_s
            for job, outcome in zip(part, outcomes, strict=True):
                self._keep(job, outcome, cpu_s / len(part))
            done = min(start + size, len(missing))
            if done // REPORTED_EVERY > start // REPORTED_EVERY or done == len(missing):
                print(f"{done} of {len(missing)} trials, {time.perf_counter() - began:.0f} s", flush=True)
        return True

    def __getitem__(self, job: Job) -> TrialResult:
        return self._known[_key(job)]

    def _keep(self, job: Job, outcome: TrialResult, cpu_s: float) -> None:
        self._known[_key(job)] = outcome
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            plain = {"key": _key(job), "cpu_s": round(cpu_s, 3), "outcome": asdict(outcome)}
            file.write(json.dumps(plain) + "\n")


def options(doc: str, steps: int = 10_000, trials: int = 3) -> argparse.ArgumentParser:
    """The command line that benchmarks of simulated trials share."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--steps", type=int, default=steps)
    add("--trials", type=int, default=trials)
    add(
        "--seed", type=int, default=0, help="seed of the first trial; the others have the numbers after it (default: 0)"
    )
    add("--workers", type=int, help="number of processes (default: one per core)")
    add("--resume", type=Path, metavar="FILE", help="keep finished trials in this file and do not run them again")
    add("--limit-s", type=float, help="with --resume: stop after this many seconds, and begin no further trial")
    add("--plot", type=Path, metavar="PNG")
    add("--json", type=Path)
    return parser


def outcomes(
    args: argparse.Namespace, cases: Sequence[Case], counts: Sequence[int] = ()
) -> tuple[list[list[TrialResult]], dict[str, object]] | None:
    """The outcomes of every case's trials for this command line, and the config for the report; None when the time
    limit was reached. ``counts``: how many trials each case has, where that differs."""
    seeds = range(args.seed, args.seed + args.trials)
    jobs = [
        [(case, args.seed + n) for n in range(count)]
        for case, count in zip(cases, counts or [args.trials] * len(cases), strict=True)
    ]
    began = time.perf_counter()
    trials = Trials(args.resume, args.workers)
    if not trials.run((job for of_case in jobs for job in of_case), args.limit_s):
        return None
    config = {
        "steps": args.steps,
        "trials": args.trials,
        "seeds": f"{seeds[0]}..{seeds[-1]}",
        "cpu_s": round(trials.cpu_s),
        "wall_s": round(time.perf_counter() - began),
    }
    return [[trials[job] for job in of_case] for of_case in jobs], config


def mean_ratio(outcomes: Sequence[TrialResult]) -> float:
    """The mean ratio of the trials; NaN where one made no progress."""
    known = [outcome.ratio for outcome in outcomes if outcome.ratio is not None]
    return fmean(known) if len(known) == len(outcomes) else float("nan")


def _key(job: Job) -> str:
    return repr(job)


def _cpu_s() -> float:
    """CPU time of this process and of the workers that it has ended."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def _outcome(plain: dict[str, Any]) -> TrialResult:
    return TrialResult(**{**plain, "tally": TrialCounts(**plain["tally"])})
