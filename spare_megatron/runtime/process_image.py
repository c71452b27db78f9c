"""Lets ``/proc/PID/cmdline`` and ``/proc/PID/environ`` of a forked process show what it runs, as if it had been
executed.

Without this, ``ps`` and ``pkill -f`` would find the command line of the parent, and whoever looks for the processes of
a job by their environment (``SPARE_RUN_DIR``) would miss them. The kernel reads both from the process's memory at
addresses that PR_SET_MM_MAP sets; it needs no privilege (prctl(2), Linux 3.18, CONFIG_CHECKPOINT_RESTORE).
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

_PR_SET_MM, _PR_SET_MM_MAP = 35, 14
_MAP = struct.Struct("=12QII")
"""struct prctl_mm_map: start and end of code, of data, of the heap, start of the stack, start and end of the arguments,
of the environment, then an auxiliary vector (none: it stays) and a descriptor of the executable (-1: it stays)."""
_CODE, _STACK, _DATA = 25, 27, 44
"""Positions in /proc/self/stat, counted from 0: start and end of the code; start of the stack; start and end of the
data, start of the heap."""

_shown: list[mmap.mmap] = []
"""The memory that the kernel reads; it must stay."""


def show_as(command: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Show this command line and environment from now on; returns whether the kernel took them."""
    words = b"".join(word.encode(errors="surrogateescape") + b"\0" for word in command)
    pairs = b"".join(f"{name}={value}".encode(errors="surrogateescape") + b"\0" for name, value in environ.items())
    memory = mmap.mmap(-1, len(words) + len(pairs) + 1, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # read only if so
    memory.write(words + pairs)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    middle, end = start + len(words), start + len(words) + len(pairs)
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    stat = ["", "", *fields]  # the process id and the name come before
    code = [int(stat[n]) for n in (_CODE, _CODE + 1)]
    data = [int(stat[n]) for n in (_DATA, _DATA + 1, _DATA + 2)]
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sbrk.restype, libc.sbrk.argtypes = ctypes.c_void_p, (ctypes.c_ssize_t,)
    layout = (*code, *data, libc.sbrk(0), int(stat[_STACK]), start, middle, middle, end, 0)
    wanted = ctypes.create_string_buffer(_MAP.pack(*layout, 0, 0xFFFFFFFF), _MAP.size)
    if libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, wanted, ctypes.c_ulong(_MAP.size), 0) != 0:
        return False
    _shown.append(memory)
    return True
