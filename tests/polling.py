"""Waits for what other processes and threads do."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(what: str, true: Callable[[], object], timeout_s: float = 30.0, every_s: float = 0.02) -> None:
    """Poll until ``true()``; AssertionError with ``what`` was waited for, where it does not come true."""
    deadline_s = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s: {what}"
        time.sleep(every_s)
