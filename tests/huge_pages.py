"""Imported last by the tests' parent: puts what it has imported into pages of 2 MiB, where Linux does that (6.1).

A fork copies the table of all pages, of which there are then few, and the processes of a job of six ranks need a sixth
less of a processor. Nothing depends on it.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

HUGE_BYTES = 2 << 20
MADV_COLLAPSE = 25


def collapse() -> int:
    """Do it for this process; the number of huge pages."""
    advise, made = ctypes.CDLL(None).madvise, 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, rights, _, _, inode, *name = line.split()
        if "w" not in rights or inode != "0" or name not in ([], ["[heap]"]):
            continue
        begin, end = (int(address, 16) for address in place.split("-"))
        for address in range(-(-begin // HUGE_BYTES) * HUGE_BYTES, end - HUGE_BYTES + 1, HUGE_BYTES):
            made += advise(ctypes.c_void_p(address), ctypes.c_size_t(HUGE_BYTES), MADV_COLLAPSE) == 0
    return made


collapse()
