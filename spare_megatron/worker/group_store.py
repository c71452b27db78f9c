"""A rank's connections to its group's store, and the store as torch takes it.

:class:`StoreClient` has one connection and does one request after the other: a thread that must not be held up by
another's wait needs a client of its own (:meth:`StoreClient.another`). :class:`GroupStore` makes of it what torch's
process groups want. torch keeps the C++ part of such an object alive and not the Python part that does the work, so its
owner keeps it for as long as there are process groups (:func:`keep`).
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from spare_megatron.collectives.handshake import STORE, Identity, StrangerError, call_from, call_in
from spare_megatron.collectives.interface import family_of
from spare_megatron.config.host_port import split_address
from spare_megatron.runtime.socket_reads import read_exactly
from spare_megatron.worker import store_messages

SLACK_S = 10.0
"""How much later than its time-out an answer may come."""
_kept: list[GroupStore] = []


class StoreTimeoutError(dist.DistStoreError):
    """A key was not there in time; torch looks for this kind of error."""


class StoreGoneError(ConnectionError):
    """The store's server has ended, or does not answer."""


class StoreClient:
    """One connection to a group's store. Thread-safe; a request waits for the one before it."""

    def __init__(self, me: Identity, address: str, number: int = 0, timeout_s: float = 300.0) -> None:
        """Connect to the store of ``me``'s group at host:port ``address``. ``number`` is the store's, which server and
        clients compare; ``timeout_s`` is how long a request waits unless it says otherwise.

        Raises:
            ConnectionError: no store of this group answers there.
        """
        self._me, self.address, self._number, self.timeout_s = me, address, number, timeout_s
        self._lock = threading.Lock()
        host, port = split_address(address)
        self._sock = socket.socket(family_of(host), socket.SOCK_STREAM)
        try:
            self._sock.settimeout(min(timeout_s, SLACK_S))
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sock.connect((host, port))
            call_in(call_from(me, STORE, me.member, number), me.key, self._sock.sendall, self._read)
        except (OSError, StrangerError) as error:
            self._sock.close()
            raise StoreGoneError(f"no store of this group answers at {address}: {error}") from None

    def another(self) -> StoreClient:
        """A client with a connection of its own."""
        return StoreClient(self._me, self.address, self._number, self.timeout_s)

    def close(self) -> None:
        """Hang up."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def __del__(self) -> None:
        if hasattr(self, "_sock"):  # as torch's stores do, which nobody closes
            self._sock.close()

    def set(self, key: str, value: bytes) -> None:
        """Set the value of a key."""
        self._ask(store_messages.Request(store_messages.Op.SET, (key.encode(),), (value,)))

    def get(self, key: str) -> bytes:
        """The value of a key, once it is there. Raises StoreTimeoutError, StoreGoneError."""
        return self.get_all([key])[0]

    def get_all(self, keys: Sequence[str]) -> list[bytes]:
        """The values of keys, once all are there. Raises StoreTimeoutError, StoreGoneError."""
        return list(self._ask(store_messages.Request(store_messages.Op.GET, _bytes(keys), timeout_s=self.timeout_s)))

    def delete(self, key: str) -> bool:
        """Remove a key; whether it was there."""
        return self._ask(store_messages.Request(store_messages.Op.DELETE, (key.encode(),))) == (b"1",)

    def ask(
        self, op: store_messages.Op, keys: Sequence[str], values: Sequence[bytes] = (), timeout_s: float = 0.0
    ) -> Sequence[bytes]:
        """Any other request; its values. Raises StoreTimeoutError, StoreGoneError, ValueError where it is refused."""
        return self._ask(store_messages.Request(op, _bytes(keys), tuple(values), timeout_s))

    def _ask(self, request: store_messages.Request) -> tuple[bytes, ...]:
        with self._lock:
            try:
                self._sock.settimeout(request.timeout_s + SLACK_S)
                self._sock.sendall(store_messages.pack_request(request))
                answer = self._answer()
            except OSError as error:  # what is left of this answer would be taken for the next one's
                self.close()
                raise StoreGoneError(f"the group's store at {self.address} is gone: {error}") from None
        if answer.status == store_messages.TIMED_OUT:
            keys = ", ".join(key.decode() for key in request.keys[:3])
            raise StoreTimeoutError(f"{keys} did not come into the group's store within {request.timeout_s:g} s")
        if answer.status != store_messages.DONE:
            raise ValueError(answer.values[0].decode() if answer.values else "the group's store refuses a request")
        return answer.values

    def _answer(self) -> store_messages.Answer:
        header = self._read(store_messages.HEADER_BYTES)
        size = store_messages.body_bytes(header)
        answer = None if size is None else store_messages.read_answer(header + self._read(size))
        if answer is None:
            raise ConnectionResetError("its answer is none")
        return answer

    def _read(self, size: int) -> bytes:
        return read_exactly(self._sock, size, "it")


class GroupStore(dist.Store):  # type: ignore[misc,name-defined]  # torch's stubs lack it
    """The store for torch's process groups."""

    def __init__(self, client: StoreClient) -> None:
        super().__init__()
        self.client = client
        self.set_timeout(timedelta(seconds=client.timeout_s))

    def clone(self) -> GroupStore:
        """The same store by a connection of its own."""
        return keep(GroupStore(self.client.another()))

    def set(self, key: str, value: str | bytes) -> None:
        """Set the value of a key."""
        self.client.set(key, _value(value))

    def get(self, key: str) -> bytes:
        """The value of a key, once it is there."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of keys, once all are there."""
        return list(self.client.ask(store_messages.Op.GET, keys, timeout_s=self.timeout.total_seconds()))

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set the values of keys at once."""
        self.client.ask(store_messages.Op.SET, keys, [_value(value) for value in values])

    def append(self, key: str, value: str | bytes) -> None:
        """Put ``value`` behind the value of a key."""
        self.client.ask(store_messages.Op.APPEND, [key], [_value(value)])

    def add(self, key: str, value: int) -> int:
        """Add to the number that a key has, 0 where it has none; the sum."""
        return int(self.client.ask(store_messages.Op.ADD, [key], [b"%d" % value])[0])

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Set ``desired_value`` where the key has ``expected_value``, or neither is there; what the key has then."""
        return self.client.ask(store_messages.Op.COMPARE_SET, [key], [_value(expected_value), _value(desired_value)])[0]

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
        return self.client.ask(store_messages.Op.CHECK, keys)[0] == b"1"

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return when all keys are there."""
        self.client.ask(
            store_messages.Op.WAIT, keys, timeout_s=(self.timeout if timeout is None else timeout).total_seconds()
        )

    def delete_key(self, key: str) -> bool:
        """Remove a key; whether it was there."""
        return self.client.delete(key)

    def num_keys(self) -> int:
        """The number of keys."""
        return int(self.client.ask(store_messages.Op.COUNT, [])[0])

    def has_extended_api(self) -> bool:
        """Whether append, multi_get and multi_set are there."""
        return True


def keep(store: GroupStore) -> GroupStore:
    """Keep ``store`` until the process ends."""
    _kept.append(store)
    return store


def _bytes(keys: Sequence[str]) -> tuple[bytes, ...]:
    return tuple(key.encode() for key in keys)


def _value(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
