"""The key-value store through which the ranks of one group find each other: one server in each group, beside its
leader.

The server is torch's TCPStore with the libuv backend, on purpose: the older backend serves all clients from
one thread with blocking reads, so one client that is stopped (SIGSTOP) in the middle of a request blocks
every other client for as long as it stays stopped. The libuv backend was measured to answer in the same 50 us
beside clients that are stopped, killed or send garbage; tests/process/test_store.py checks it.

May assume: a trusted network (TCPStore has no authentication); the server binds to the one address it is
given. Promises: a client's death, stop or garbage never hurts the server or another client. When the server
dies, blocked operations of clients end with an error within milliseconds.
"""

from __future__ import annotations

import socket
from datetime import timedelta

import torch.distributed as dist

from spare_megatron.config.errors import ConfigError


class StoreServer:
    """A store that lives as long as this object."""

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
