"""The key-value store through which ranks find each other: one server beside the coordinator, clients
everywhere.

The server is torch's TCPStore with the libuv backend, on purpose: the older backend serves all clients from
one thread with blocking reads, so one client that is stopped (SIGSTOP) in the middle of a request blocks
every other client for as long as it stays stopped. The libuv backend was measured to answer in the same 50 us
beside clients that are stopped, killed or send garbage; tests/process/test_store.py checks it.

May assume: a trusted network (TCPStore has no authentication); the server binds to the one address it is
given. Promises: a client's death, stop or garbage never hurts the server or another client. When the server
dies, blocked operations of clients end with an error within milliseconds, and communicators that are already
formed go on working.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from datetime import timedelta

import torch.distributed as dist

from spare_megatron.config.errors import ConfigError


class StoreServer:
    """A store that lives as long as this object. For the coordinator's process, never for a training rank."""

    def __init__(self, host: str, port: int = 0) -> None:
        listener = _listen(host, port)
        self.host = host
        self.port: int = listener.getsockname()[1]
        self._store: dist.TCPStore | None = dist.TCPStore(
            host,
            self.port,
            is_master=True,
            wait_for_workers=False,
            use_libuv=True,
            master_listen_fd=listener.detach(),
        )

    def close(self) -> None:
        """Stop serving; blocked clients get an error."""
        self._store = None


def connect(host: str, port: int, timeout_s: float) -> dist.TCPStore:
    """A client with its own connection. Raises ConnectionError when no store answers within ``timeout_s``.

    A blocked ``wait`` or ``get`` holds its client's lock: a thread that must not be held up by another's wait needs
    a client of its own.
    """
    try:
        socket.create_connection((host, port), timeout=timeout_s).close()
    except OSError as error:
        raise ConnectionError(f"no store answers at {host}:{port} within {timeout_s:g} s: {error}") from error
    return dist.TCPStore(
        host,
        port,
        is_master=False,
        wait_for_workers=False,
        use_libuv=True,
        timeout=timedelta(seconds=timeout_s),
    )


class StoreClients:
    """Connections that are kept and used again, each by one user at a time. Thread-safe.

    Connecting is not only a round trip: torch formats the peer's address with a reverse name look-up, which takes
    5 s where a name server does not answer. That must not happen while a job recovers, so some connections are kept
    in reserve: for the members of the next epoch to meet, and to end the meeting of one that is over.
    """

    RESERVE = 3
    """Connections kept for each store: for an epoch that ends, one that forms, and one more where they overlap."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._idle: dict[tuple[str, int], list[dist.TCPStore]] = {}

    def take(self, host: str, port: int) -> dist.TCPStore:
        """A client that works, for one user. Raises ConnectionError when no store answers."""
        while True:
            with self._lock:
                idle = self._idle.get((host, port))
                client = idle.pop() if idle else None
            if client is None:
                return connect(host, port, self._timeout_s)
            with contextlib.suppress(dist.DistError):
                client.check(["-"])
                return client

    def give(self, host: str, port: int, client: dist.TCPStore) -> None:
        """Take back a ``client`` on which nobody waits any more."""
        with self._lock:
            idle = self._idle.setdefault((host, port), [])
            if len(idle) < self.RESERVE:
                idle.append(client)

    def stock(self, host: str, port: int) -> None:
        """Connect until the reserve for this store is full, and drop the connections to all other stores, which are
        older. Raises ConnectionError when no store answers."""
        with self._lock:
            self._idle = {(host, port): self._idle.get((host, port), [])}
        for _ in range(self.RESERVE - len(self._idle[host, port])):
            self.give(host, port, connect(host, port, self._timeout_s))


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket on exactly this address (TCPStore itself would listen on all of the machine's addresses)."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise ConfigError(
            f"the store cannot listen on {host}:{port}: {error}; "
            "name an address of this machine and a free port (0 picks one)"
        ) from error
