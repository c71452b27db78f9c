"""Asks the kernel to run a thread soon after it wakes, although others compute on the same cores.

A thread that passes on a failure wakes for less than a millisecond, among threads that compute for seconds. Linux gives
the processor to the thread whose slice would end first (EEVDF, since 6.6; slices of a thread's own since 6.12:
https://docs.kernel.org/scheduler/sched-eevdf.html). A short slice therefore means short waits, not a larger share.
It needs no privilege. Older kernels take the call and do as before.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct

SLICE_NS = 100_000
"""The shortest slice that the kernel grants."""
_NUMBERS = {"x86_64": (314, 315), "aarch64": (274, 275)}
"""Machine -> numbers of the system calls sched_setattr and sched_getattr."""
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")
"""struct sched_attr, first version: size, policy, flags, nice, priority, runtime, deadline, period."""

_RESET_ON_FORK = 1


def ask_for_short_waits(inherited: bool = True) -> bool:
    """Give the calling thread short slices.

    Returns whether the kernel took it. Threads of another policy than the usual one are left as they are.

    Args:
        inherited: whether threads and processes that this thread starts from now on have them too. Without it they
            begin with the usual ones, for the rest of this thread's lifetime.
    """
    if os.sched_getscheduler(0) != os.SCHED_OTHER or platform.machine() not in _NUMBERS:
        return False
    put, get = _NUMBERS[platform.machine()]
    call = ctypes.CDLL(None, use_errno=True).syscall
    attributes = ctypes.create_string_buffer(_ATTRIBUTES.size)
    if call(get, 0, attributes, _ATTRIBUTES.size, 0) != 0:
        return False
    size, policy, flags, nice, priority, _, deadline, period = _ATTRIBUTES.unpack(attributes.raw)
    flags |= 0 if inherited else _RESET_ON_FORK
    wanted = _ATTRIBUTES.pack(size, policy, flags, nice, priority, SLICE_NS, deadline, period)
    return bool(call(put, 0, ctypes.create_string_buffer(wanted, len(wanted)), 0) == 0)
