"""Fuzzers of what comes in from outside: files with wrong bytes, settings with wrong values.

One rule for all: the outcome is right, or one sentence and exit 2; never a traceback, never a hang, never a silent
difference. A fuzzer is a module with ``CASES``, a strategy of hypothesis, and ``examine(folder, case)``, which asserts
the rule for one case, in an empty folder, with a second way to what is right. It is listed in ``FUZZERS``.

    python -m tests.fuzz NAME --seed S --minutes M

Every round of ROUND examples has a seed of its own, S, S + 1, ...; a failure prints the smallest case that fails.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import itertools
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

FUZZERS = {
    "pairs": "tests.fuzz.pairs",
    "text": "tests.fuzz.text",
    "flags": "tests.fuzz.flag_files",
    "words": "tests.fuzz.flag_words",
    "tracker": "tests.fuzz.tracker",
    "runs": "tests.fuzz.runs",
}
"""Name on the command line -> module."""
ROUND = 50
HANG_S = 60
"""A case that takes longer counts as one that hangs."""


def run(name: str, first_seed: int, seconds: float) -> int:
    """Examine cases of a fuzzer for so long; returns how many. Raises what the first wrong one raises."""
    module: Any = importlib.import_module(FUZZERS[name])
    until, count = time.monotonic() + seconds, 0
    for number in itertools.count(first_seed):

        @seed(number)
        @settings(max_examples=ROUND, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(module.CASES)
        def one_round(case: Any) -> None:
            nonlocal count
            if not count or time.monotonic() < until:  # making the first case may take all the time
                count += 1
                with tempfile.TemporaryDirectory() as folder, _no_hang():
                    module.examine(Path(folder), case)

        one_round()
        if time.monotonic() >= until:
            print(f"{name}: seeds {first_seed} to {number}, {count} cases, {seconds:.0f} s: nothing wrong")
            return count
    raise AssertionError("no end")


class Hang(BaseException):
    """Raised in code that takes longer than it may. No handler of errors catches it."""


@contextlib.contextmanager
def patience(seconds: int) -> Iterator[None]:
    """Raise Hang in the block after so many seconds."""

    def late(*_: Any) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def _no_hang() -> Iterator[None]:
    try:
        with patience(HANG_S):
            yield
    except Hang:
        raise AssertionError(f"the case takes longer than {HANG_S} s") from None


def outcome(main: Callable[[Sequence[str]], int], words: Sequence[str]) -> tuple[int, str, str]:
    """(exit code, standard output, the sentence) of a command: 0, or 2 with one sentence as its last line of errors."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    assert code in (0, 2), (code, err.getvalue())
    reported = err.getvalue().splitlines()[-1] if code else ""
    assert "Traceback" not in err.getvalue()
    assert not code or (": " in reported and len(reported) < 2000), err.getvalue()
    return code, out.getvalue(), reported


NUMBERS = st.sampled_from(
    [0, 1, 2, 3, 127, 128, 255, 256, 2**15, 2**16, 2**31 - 1, 2**31, 2**32, 2**62, -1, -2, -(2**31)]
)

Edit = tuple[str, float, Any]
"""(what, where as a share of the file, with what)."""

EDITS: st.SearchStrategy[list[Edit]] = st.lists(
    st.one_of(
        st.tuples(st.just("cut"), st.floats(0, 1), st.none()),
        st.tuples(st.just("insert"), st.floats(0, 1), st.binary(min_size=1, max_size=9)),
        st.tuples(st.just("put"), st.floats(0, 1), st.binary(min_size=1, max_size=4)),
        st.tuples(st.just("number"), st.floats(0, 1), st.tuples(NUMBERS, st.sampled_from([4, 8]))),
        st.tuples(st.just("repeat"), st.floats(0, 1), st.integers(1, 3)),
        st.tuples(st.just("drop"), st.floats(0, 1), st.integers(1, 40)),
        st.tuples(st.just("append"), st.just(1.0), st.binary(min_size=1, max_size=40)),
    ),
    max_size=3,
)


def edited(raw: bytes, edits: Sequence[Edit]) -> bytes:
    """The bytes after these edits, one after the other."""
    for what, share, value in edits:
        at = int(share * len(raw))
        if what == "cut":
            raw = raw[:at]
        elif what in ("insert", "append"):
            raw = raw[:at] + value + raw[at:]
        elif what == "put":
            raw = raw[:at] + value + raw[at + len(value) :]
        elif what == "number":
            number, size = value
            at -= at % 2
            raw = raw[:at] + (number % 256**size).to_bytes(size, "little") + raw[at + size :]
        elif what == "repeat":
            raw = raw[:at] + raw[at:] * (value + 1)
        else:
            raw = raw[:at] + raw[at + value :]
    return raw
