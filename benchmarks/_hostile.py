"""Clients that send wrong bytes to listening ports, one connection after the other, until they are ended.

A connection sends nothing, random bytes, or what callers of a job's ports begin with: a call of gRPC with a token, the
call of one rank to another and its proof, the number of a pair of gloo, a request of HTTP. The words are sent whole,
cut or changed. What comes back is changed and sent again. Then the connection is closed, reset, or held without a
message.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from spare_megatron.collectives.handshake import CONTROL, DATA, PROOF_BYTES, STATE, STORE, Call, Member, pack_call
from spare_megatron.config.host_port import split_address
from spare_megatron.control_plane.channel import COORDINATOR, LEADER, TOKEN_KEY

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, HEADERS, DATA_FRAME = 4, 1, 0
"""Types of HTTP/2's frames."""
RANDOM_BYTES, LARGE_BYTES = 4096, 1 << 20
HELD_S = 12.0
"""A connection that is held is held for up to this long: longer than any port waits for a proof."""
HELD_SHARE = 0.05
EDGES = (0, 1, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF)
"""Numbers of which readers of lengths and counts are not sure."""


@dataclass
class Hostile:
    """Clients of ``addresses`` (host:port), ``per_s`` new connections a second in turns; the seed determines what they
    send."""

    addresses: Sequence[str]
    seed: int
    per_s: float
    connections: int = 0
    sent_bytes: int = 0
    answered: set[str] = field(default_factory=set)
    """The addresses from which at least one byte came."""

    def come(self) -> None:
        """Connect and send for ever."""
        rng, under_way = random.Random(self.seed), list[Iterator[None]]()
        began_s = time.monotonic()
        for address in itertools.cycle(self.addresses):
            under_way.append(self._visit(address, rng))
            under_way = [one for one in under_way if next(one, self) is None]
            self.connections += 1
            time.sleep(max(0.0, began_s + self.connections / self.per_s - time.monotonic()))

    def _visit(self, address: str, rng: random.Random) -> Iterator[None]:
        """One connection. Yields wherever the others are to go on."""
        host, port = split_address(address)
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as sock:
            sock.setblocking(False)
            sock.connect_ex((host, port))
            yield
            words = message(rng)
            with contextlib.suppress(OSError):
                for _ in range(rng.randint(1, 3)):
                    self.sent_bytes += sock.send(words) if words else 0
                    yield
                    with contextlib.suppress(BlockingIOError):
                        received = sock.recv(1 << 16)
                        if received:
                            self.answered.add(address)
                            words = changed(received, rng)
                if rng.random() < HELD_SHARE:
                    until_s = time.monotonic() + rng.uniform(0.0, HELD_S)
                    while time.monotonic() < until_s:
                        yield
                elif rng.random() < 0.5:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def message(rng: random.Random) -> bytes:
    """What a connection sends first."""
    kind = rng.randrange(8)
    if kind == 0:
        return b""
    if kind == 1:
        return rng.randbytes(rng.randint(1, LARGE_BYTES if rng.random() < 0.02 else RANDOM_BYTES))
    words = (grpc_call, rank_call, grpc_call, rank_call, gloo_pair, http_request)[kind - 2](rng)
    return (words, words[: rng.randrange(len(words))], changed(words, rng))[rng.randrange(3)]


def changed(words: bytes, rng: random.Random) -> bytes:
    """The words with some bytes, numbers or parts of them changed."""
    made = bytearray(words)
    for _ in range(rng.randint(1, 8)):
        at = rng.randrange(len(made) + 1)
        how = rng.randrange(4)
        if how == 0:
            made[at : at + 1] = rng.randbytes(1)
        elif how == 1:
            made[at : at + 4] = rng.choice(EDGES).to_bytes(4, rng.choice(["big", "little"]))
        elif how == 2:
            made[at:at] = made[at : at + rng.randint(1, 64)]
        else:
            del made[at : at + rng.randint(1, 8)]
    return bytes(made)


def grpc_call(rng: random.Random) -> bytes:
    """A call of the coordinator or of a leader, with a token that is none of the job's."""
    service, method = rng.choice([COORDINATOR, LEADER]), rng.choice(["Join", "RequestStop", "Status", "None"])
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": f"/{service}/{method}",
        ":authority": "localhost",
        "te": "trailers",
        "content-type": "application/grpc",
        TOKEN_KEY: rng.randbytes(16).hex(),
    }
    headers = b"".join(b"\0" + _text(name) + _text(value) for name, value in fields.items())
    request = rng.randbytes(rng.randint(0, 2000))
    request = b"\0" + rng.choice([len(request), *EDGES]).to_bytes(4, "big") + request
    return PREFACE + _frame(SETTINGS, 0, 0, b"") + _frame(HEADERS, 4, 1, headers) + _frame(DATA_FRAME, 1, 1, request)


def rank_call(rng: random.Random) -> bytes:
    """The call of a rank of a small job to another, for a ring, for state or to a store; and a proof."""
    members = [Member(rng.randrange(3), rng.randrange(2)) for _ in range(2)]
    kind = rng.choice([DATA, CONTROL, STATE, STORE])
    call = Call(
        kind, rng.randrange(3), rng.randrange(4), rng.randrange(4), rng.randrange(3), *members, rng.randbytes(16)
    )
    return pack_call(call) + rng.randbytes(PROOF_BYTES)


def gloo_pair(rng: random.Random) -> bytes:
    """The number of a pair, as gloo's own connections begin, and what may be a message behind it."""
    return rng.randrange(64).to_bytes(8, "little") + rng.randbytes(rng.randint(0, 64))


def http_request(rng: random.Random) -> bytes:
    """A request of HTTP/1.1."""
    path = rng.choice(["/", "/metrics", "/status", "/../token", "/" + "a" * rng.randint(1, 9000)])
    length = rng.choice([0, *EDGES])
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n".encode()


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def _text(text: str) -> bytes:
    """A string of HPACK without Huffman's code; shorter than 127 bytes."""
    return bytes([len(text)]) + text.encode()
