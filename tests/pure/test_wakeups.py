"""Threads that ask for it wait less for the processor; others are left as they are."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from spare_megatron.runtime import wakeups

SLICES_OF_THEIR_OWN = (6, 12)
"""The Linux from which on a thread's slice counts."""
release = tuple(int(number) for number in platform.release().split(".")[:2])
pytestmark = pytest.mark.skipif(
    release < SLICES_OF_THEIR_OWN or platform.machine() not in wakeups._NUMBERS,
    reason=f"Linux {platform.release()} on {platform.machine()} has no slices of a thread's own",
)


def attributes() -> tuple[int, ...]:
    """The scheduler's attributes of the calling thread, as the kernel says them."""
    found = ctypes.create_string_buffer(wakeups._ATTRIBUTES.size)
    number = wakeups._NUMBERS[platform.machine()][1]
    assert ctypes.CDLL(None).syscall(number, 0, found, wakeups._ATTRIBUTES.size, 0) == 0
    return wakeups._ATTRIBUTES.unpack(found.raw)


def in_a_thread(work: Callable[[], object]) -> None:
    """Run ``work`` in a thread that ends with it."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def slice_of_a_child() -> int:
    """The slice of a process that the calling thread starts."""
    code = "from tests.pure.test_wakeups import attributes; print(attributes()[5])"
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


@pytest.mark.parametrize("inherited", [True, False])
def test_a_thread_and_what_it_starts_have_short_slices_and_others_do_not(inherited: bool) -> None:
    usual, found = attributes(), {}

    def work() -> None:
        found["took"] = wakeups.ask_for_short_waits(inherited)
        found["own"] = attributes()
        in_a_thread(lambda: found.__setitem__("thread", attributes()[5]))
        found["child"] = slice_of_a_child()

    in_a_thread(work)
    short = wakeups.SLICE_NS
    assert found["took"]
    assert found["own"][5] == short < usual[5]
    assert (found["own"][1], found["own"][3]) == (usual[1], usual[3]), "policy and niceness"
    expected = short if inherited else usual[5]
    assert (found["thread"], found["child"]) == (expected, expected)
    assert attributes() == usual


def test_a_policy_that_somebody_chose_is_kept() -> None:
    found = {}

    def work() -> None:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        found["took"] = wakeups.ask_for_short_waits()
        found["policy"] = os.sched_getscheduler(0)

    in_a_thread(work)
    assert found == {"took": False, "policy": os.SCHED_BATCH}
