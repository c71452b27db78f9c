"""Makes SIGTERM and SIGUSR1 to a rank that Slurm started a request to save and leave, instead of a death.

Slurm sends signals to every process of a step: before the end of the time limit, and when the job must make room.
A thread reads the byte that Python's own handler writes (``signal.set_wakeup_fd``), because the main thread may be
inside a collective for long.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator

from spare_megatron.config.place import Place

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


@contextlib.contextmanager
def stop_on_signals(place: Place, request_stop: Callable[[str], None]) -> Iterator[None]:
    """Inside this context a signal makes position 0 of a group call ``request_stop('signal SIGTERM')``, in a thread of
    its own; the other ranks ignore it. Does nothing where the launcher is not Slurm. For the main thread."""
    if place.launcher != "slurm":
        yield
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    before = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
    fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)

    def listen() -> None:
        while number := reader.recv(1):
            if place.is_leader and number[0] in SIGNALS:
                request_stop(f"signal {signal.Signals(number[0]).name}")

    thread = threading.Thread(target=listen, name="spare-signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(fd)
        for number, handler in before.items():
            signal.signal(number, handler)
        writer.close()
        thread.join()
        reader.close()
