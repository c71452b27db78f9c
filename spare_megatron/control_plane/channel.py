"""Channels and servers of gRPC: with keepalive, without proxies, the job token on every call, mutual TLS if wanted.

The services of control.proto are served by generic handlers, so no generated stubs are needed. With a TLS directory
(:mod:`spare_megatron.control_plane.tls_files`) both sides prove who they are; the name in the certificate is
``spare-megatron`` on every host, because hosts come and go.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import logging
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.host_port import split_address
from spare_megatron.control_plane import control_pb2 as pb
from spare_megatron.control_plane.encoded_order import order_bytes
from spare_megatron.control_plane.tls_files import TLS_FILES, TLS_NAME, check_tls, tls_of
from spare_megatron.runtime.descriptors import connections_max
from spare_megatron.runtime.run_directory import RunDirectory

log = logging.getLogger(__name__)

TOKEN_KEY = "spare-token"
REFUSED_MAX = 100
"""Of how many hosts it is said that their callers were refused."""
COORDINATOR = "spare_megatron.control_plane.Coordinator"
LEADER = "spare_megatron.control_plane.Leader"
LAUNCHER = "spare_megatron.control_plane.Launcher"

PENDING_MAX = 100_000
"""Calls that may wait to be accepted: gRPC itself cancels some of those beyond 1000."""
PENDING_S = 600
"""How long a call may wait to be accepted, in seconds: gRPC itself cancels it after 30, and thousands of groups take
longer to arrive."""

STRANGER_MS = 10_000
"""How long a connection may take to begin, and how long it may be without a call: callers keep none of those. With
these and the limit of :func:`~spare_megatron.runtime.descriptors.connections_max` connections of strangers, who cannot
make a call, are bounded in time and number."""

_OPTIONS = (
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
)
_SERVER_OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 100),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 100),
    ("grpc.server.max_pending_requests", PENDING_MAX),
    ("grpc.server.max_pending_requests_hard_limit", PENDING_MAX),
    ("grpc.server_max_unrequested_time_in_server", PENDING_S),
    ("grpc.server_handshake_timeout_ms", STRANGER_MS),
    ("grpc.max_connection_idle_ms", STRANGER_MS),
)


@dataclass(frozen=True)
class Security:
    """The credentials of every call: the job token, and the TLS files if there are any."""

    token: str
    tls_dir: str = ""
    """Directory of ca.pem, cert.pem and key.pem; empty for no TLS."""

    def __post_init__(self) -> None:
        if self.tls_dir:
            check_tls(self.tls_dir)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The gRPC metadata that every call carries."""
        return ((TOKEN_KEY, self.token),)

    def files(self) -> tuple[bytes, bytes, bytes]:
        """The contents of the TLS files: (ca, cert, key)."""
        ca, cert, key = ((Path(self.tls_dir) / name).read_bytes() for name in TLS_FILES)
        return ca, cert, key


def security_of(run_dir: RunDirectory, tls_dir: str, create: bool = False) -> Security:
    """The credentials of a process of the job in ``run_dir``; ``tls_dir`` as the user gave it. Raises ConfigError."""
    return Security(run_dir.token(create), tls_of(run_dir.path, tls_dir))


def open_channel(address: str, security: Security, patience_s: float) -> grpc.aio.Channel:
    """A channel that shares nothing with others, so that a failed attempt leaves no back-off behind for the next.

    It breaks when the other side has not answered for about ``patience_s``."""
    options = [
        *_OPTIONS,
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.keepalive_time_ms", max(100, round(500 * patience_s))),
        ("grpc.keepalive_timeout_ms", max(100, round(1000 * patience_s))),
    ]
    if not security.tls_dir:
        return grpc.aio.insecure_channel(address, options=options)
    ca, cert, key = security.files()
    credentials = grpc.ssl_channel_credentials(ca, key, cert)
    return grpc.aio.secure_channel(
        address, credentials, options=[*options, ("grpc.ssl_target_name_override", TLS_NAME)]
    )


def call_stream(channel: grpc.aio.Channel, service: str, security: Security, report: Any, order: Any = pb.Order) -> Any:
    """Open the bidirectional stream ``Join`` of a service, which sends messages of type ``report`` and yields
    those of type ``order``."""
    method = channel.stream_stream(
        f"/{service}/Join", request_serializer=report.SerializeToString, response_deserializer=order.FromString
    )
    return method(metadata=security.metadata)


async def call_once(
    channel: grpc.aio.Channel, method: str, security: Security, request: Any, timeout_s: float, answer: Any = pb.Done
) -> Any:
    """Call a method of the coordinator once; returns its answer, a message of type ``answer``."""
    call = channel.unary_unary(
        f"/{COORDINATOR}/{method}",
        request_serializer=type(request).SerializeToString,
        response_deserializer=answer.FromString,
    )
    return await call(request, metadata=security.metadata, timeout=timeout_s)


class _TokenCheck(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses every call without the job token before it reaches a handler, and before its message is read."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._refused: set[str] = set()
        """Hosts of callers that were refused; each is said once."""

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        given = dict(details.invocation_metadata or ()).get(TOKEN_KEY, "")
        if hmac.compare_digest(str(given).encode(), self._token.encode()):
            return await continuation(details)

        async def refuse(_: Any, context: grpc.aio.ServicerContext) -> None:
            self._announce_once(context.peer())
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the job token is wrong or missing")

        # As a stream, whatever the caller calls it: gRPC reads a message of a stream when the handler asks for it, and
        # this one asks for none. A unary call's message is read, copied and parsed before its handler runs.
        return grpc.stream_stream_rpc_method_handler(refuse)

    def _announce_once(self, peer: str) -> None:
        host = peer.rpartition(":")[0]
        if host not in self._refused and len(self._refused) < REFUSED_MAX:
            self._refused.add(host)
            log.warning("a caller at %s has no token of this job, or another one, and is not received", peer)


StreamHandler = Callable[[Any, grpc.aio.ServicerContext], Awaitable[None]]
UnaryHandler = Callable[[Any, grpc.aio.ServicerContext], Awaitable[Any]]


async def serve(
    listen: str,
    service: str,
    security: Security,
    join: StreamHandler,
    report: Any,
    unary: dict[str, tuple[Any, UnaryHandler]] | None = None,
) -> tuple[grpc.aio.Server, int]:
    """Start a server of one service on ``host:port`` (port 0: any free one). Returns it with its port.

    Raises:
        ConfigError: nobody can listen there; the sentence says why.
    """
    most = ("grpc.max_allowed_incoming_connections", connections_max())
    server = grpc.aio.server(interceptors=[_TokenCheck(security.token)], options=[*_OPTIONS, *_SERVER_OPTIONS, most])
    handlers = {
        "Join": grpc.stream_stream_rpc_method_handler(
            join, request_deserializer=report.FromString, response_serializer=order_bytes
        )
    }
    for name, (request, handler) in (unary or {}).items():
        handlers[name] = grpc.unary_unary_rpc_method_handler(
            handler,
            request_deserializer=request.FromString,
            response_serializer=lambda reported: reported.SerializeToString(),
        )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    try:
        if security.tls_dir:
            ca, cert, key = security.files()
            credentials = grpc.ssl_server_credentials([(key, cert)], root_certificates=ca, require_client_auth=True)
            port = server.add_secure_port(listen, credentials)
        else:
            port = server.add_insecure_port(listen)
    except RuntimeError:
        port = 0
    if port == 0:
        raise ConfigError(f"cannot listen on {listen}: {_why_not(listen)}")
    await server.start()
    return server, port


def _why_not(listen: str) -> str:
    """Why nobody can listen on an address, with the fix; gRPC does not say."""
    host, port = split_address(listen)
    try:
        family, kind, _, _, place = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(place)
    except OSError as error:
        fixes = {
            errno.EADDRINUSE: "use port 0 for any free one",
            errno.EADDRNOTAVAIL: f"{host} is none of the addresses of {socket.gethostname()}; give one of them",
        }
        return "; ".join([error.strerror or str(error), *filter(None, [fixes.get(error.errno or 0)])])
    return "gRPC gives no reason, and the address is free now; try again"


class Backoff:
    """Pauses between attempts to connect, short at first: a coordinator that was restarted is back within a second."""

    def __init__(self, first_s: float = 0.02, most_s: float = 0.5) -> None:
        self._first_s, self._most_s = first_s, most_s
        self.reset()

    def reset(self) -> None:
        """The connection stands; after the next failure the pauses begin short again."""
        self._next_s = self._first_s
        self.since_s = time.monotonic()

    @property
    def waited_s(self) -> float:
        """Seconds without a connection."""
        return time.monotonic() - self.since_s

    async def wait(self) -> None:
        """Return when it is time for the next attempt."""
        await asyncio.sleep(self._next_s)
        self._next_s = min(self._most_s, 2 * self._next_s)
