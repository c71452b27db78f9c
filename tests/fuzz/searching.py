"""What fuzzers of converted models share: the search by a seed and a time, and a command's answer."""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis.strategies import SearchStrategy

from tests.fuzz import Hang, patience

PATIENCE_S = 30
"""What takes longer than this hangs; no input here is large."""
BATCH = 50


@dataclass(frozen=True)
class Verdict:
    """What became of one example."""

    outcome: str
    """A word such as 'accepted' or 'refused', which is counted."""
    fault: str = ""
    """What is wrong; empty if nothing is."""


def search(
    name: str, examples: SearchStrategy[Any], judge: Callable[[Any], Verdict], seed: int, minutes: float
) -> tuple[list[str], Counter[str]]:
    """Judge examples until the time is over, and the first batch in any case; returns the findings, each kind of fault
    once, and the outcomes' counts.

    The seed alone determines the examples; the time, how many of them there are.
    """
    found: dict[str, str] = {}
    counts: Counter[str] = Counter()
    end, batch = time.monotonic() + 60 * minutes, 0

    def one(example: Any) -> None:
        if batch and time.monotonic() > end:
            return
        verdict = judge(example)
        counts[verdict.outcome] += 1
        if verdict.fault:
            key = f"{verdict.outcome} {verdict.fault[:60]}"
            if key not in found:
                found[key] = f"{verdict.fault}; example {example!r}"
                print(f"{name}: {found[key]}"[:4000], flush=True)

    while not batch or time.monotonic() < end:
        run = hypothesis.given(examples)(one)
        run = hypothesis.settings(
            max_examples=BATCH,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )(run)
        hypothesis.seed(seed * 1_000_003 + batch)(run)()
        batch += 1
    shown = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
    print(f"{name}: seed {seed}, {minutes:g} minutes: {shown}; {len(found)} findings", flush=True)
    return list(found.values()), counts


def answer(command: Callable[[list[str]], int], words: list[str]) -> tuple[int | None, str]:
    """A command's exit code and what it wrote to stderr; code None and the end of the traceback where it raises, or
    does not end."""
    output, error = io.StringIO(), io.StringIO()
    try:
        with patience(PATIENCE_S), contextlib.redirect_stdout(output), contextlib.redirect_stderr(error):
            return command(words), error.getvalue()
    except Hang:
        return None, f"no answer after {PATIENCE_S} s"
    except BaseException:
        return None, traceback.format_exc()[-600:]


def main(run: Callable[[int, float], list[str]]) -> int:
    """The command line of a fuzzer; exit code 1 if it finds something."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=1.0)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    return 1 if run(options.seed, options.minutes) else 0


def finish(run: Callable[[int, float], list[str]]) -> None:
    """For a module that is started by itself."""
    sys.exit(main(run))
