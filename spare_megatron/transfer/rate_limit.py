"""Limits the bytes a second that all senders of a rank send together."""

from __future__ import annotations

import threading

SLICE_BYTES_MAX = 1 << 20
_SLICES_PER_S = 20


class RateLimit:
    """Says how long to wait before each slice of bytes is sent. Thread-safe, and without a clock of its own."""

    def __init__(self, rate_bytes_s: float) -> None:
        """``rate_bytes_s``: 0 for no limit."""
        self._rate_bytes_s = rate_bytes_s
        self.slice_bytes = SLICE_BYTES_MAX
        """The most that may be sent after one wait: little enough that several senders get their turns."""
        if rate_bytes_s:
            self.slice_bytes = max(1, min(SLICE_BYTES_MAX, int(rate_bytes_s / _SLICES_PER_S)))
        self._lock = threading.Lock()
        self._free_s = 0.0
        """When all that was allowed so far is sent."""

    def wait_s(self, size: int, now_s: float) -> float:
        """How long from ``now_s`` on to wait before ``size`` more bytes are sent; they count from now on."""
        if not self._rate_bytes_s:
            return 0.0
        with self._lock:
            start_s = max(now_s, self._free_s)
            self._free_s = start_s + size / self._rate_bytes_s
        return start_s - now_s
