"""Makes the signals that ask a job to leave (:mod:`spare_megatron.runtime.stop_signals`) a request of this rank to save
and leave, instead of its death.

Slurm, torchrun, systemd and others signal every process of a job: before the end of a time limit, and when the job must
make room. A thread reads the byte that Python's own handler writes (``signal.set_wakeup_fd``), because the main thread
may be inside a collective for long.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

from spare_megatron.config.exits import SIGNAL_REASON
from spare_megatron.config.place import Place
from spare_megatron.control_plane.control_thread import leave_at_once
from spare_megatron.control_plane.session import Session
from spare_megatron.runtime.stop_signals import ignore_stop_signals, stop_signals

LOST_S = 2.0
"""Within this time a rank knows that its group has lost another one."""
_before: dict[signal.Signals, Any] = {}
"""The handlers that this process had before :func:`stop_on_signals`."""


def _in_a_child() -> None:
    """Reset the handlers in a forked process, such as a data loader. It inherits the descriptor to which they write, so
    a signal to it would look like one to the rank."""
    if _before:
        signal.set_wakeup_fd(-1)
        for number, handler in _before.items():
            signal.signal(number, handler)
        _before.clear()


os.register_at_fork(after_in_child=_in_a_child)


@contextlib.contextmanager
def stop_on_signals(place: Place, session: Session) -> Iterator[None]:
    """Inside this context the first signal asks the job to save and leave, in a thread of its own; later ones change
    nothing, because whoever does not want to wait can kill. For the main thread.

    On a lent node such a signal means that the node is to leave: its agent then lets the group leave, and the job goes
    on.

    torchrun sends the same signal to the other ranks of a group that lost a rank, before it restarts the group. In that
    case this process leaves, and the job goes on.
    """
    if place.lent:
        ignore_stop_signals()
        yield
        return
    taken = stop_signals()
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    _before.update((number, signal.signal(number, lambda *_: None)) for number in taken)
    fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)

    def listen() -> None:
        while (number := reader.recv(1)) and number[0] not in taken:
            pass
        if not number:
            return
        if place.launcher == "torchrun" and _is_lost(session):
            leave_at_once("torchrun ends what is left of this group, which lost a rank")
        session.request_stop(f"{SIGNAL_REASON} {signal.Signals(number[0]).name}")
        while reader.recv(1):
            pass

    thread = threading.Thread(target=listen, name="spare-signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(fd)
        for number, handler in _before.items():
            signal.signal(number, handler)
        _before.clear()
        writer.close()
        thread.join(LOST_S + 1.0)
        reader.close()


def _is_lost(session: Session) -> bool:
    """Whether the group is, or within :data:`LOST_S` turns out to be, no member of the job any more."""
    deadline_s, orders = time.monotonic() + LOST_S, session.orders
    while not orders.over and (left_s := deadline_s - time.monotonic()) > 0:
        orders = session.wait(orders.version, left_s)
    return orders.over
