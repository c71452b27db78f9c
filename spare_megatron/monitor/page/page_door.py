"""Access control of the page's server. It changes nothing, so only GET is accepted.

With a token, every request must carry it. Without one the server listens on the loopback device alone, and a request
must name a loopback host, or a page from elsewhere that a browser on this machine shows could give its own name the
address 127.0.0.1 and read on.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Callable
from pathlib import Path

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

from spare_megatron.config import host_port
from spare_megatron.config.errors import ConfigError

TOKEN_MIN = 16
"""Characters of a token."""
HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


def listen_address(listen: str, token: str) -> tuple[str, int]:
    """(host, port) of ``--listen``. Raises ConfigError where it is none, or others can reach it and there is no
    token."""
    host, port = host_port.listen_address(listen, "127.0.0.1:8080")
    if not token and not is_loopback(host):
        raise ConfigError(
            f"--listen {listen} can be reached from other machines, so give --token-file too: "
            "(umask 077; openssl rand -hex 16 >page.token) makes one"
        )
    return host, port


def read_token(path: Path | None) -> str:
    """The token of ``--token-file``; empty where there is no file. Raises ConfigError."""
    if path is None:
        return ""
    try:
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(f"--token-file {path} cannot be read: {why}") from None
    if len(token) < TOKEN_MIN:
        raise ConfigError(f"--token-file {path} has {len(token)} characters; a token has at least {TOKEN_MIN}")
    return token


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host of this name."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def door(token: str, let_in: Callable[[object], bool]) -> Middleware:
    """Lets through who may ask, and nobody else. ``let_in`` is asked of a connection whose request may be answered."""

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method not in (hdrs.METH_GET, hdrs.METH_HEAD):
            return _refused(405, "the page only shows; it takes GET alone", {"Allow": "GET, HEAD"})
        if token and not hmac.compare_digest(_given(request).encode(errors="replace"), token.encode()):
            why = "the token is missing or wrong: give ?token=... or the header Authorization: Bearer ..."
            return _refused(401, why, {"WWW-Authenticate": "Bearer"})
        if not token and not is_loopback(_host(request)):
            return _refused(403, "without --token-file the page answers to localhost and 127.0.0.1 alone")
        if not let_in(request.protocol):
            return closing(_refused(503, "too many connections are open; close one"))
        try:
            return await handler(request)
        except web.HTTPNotFound:
            return _refused(404, "there is no such page")

    return guarded


def _given(request: web.Request) -> str:
    scheme, _, given = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
    return given.strip() if scheme.lower() == "bearer" else request.query.get("token", "")


def _host(request: web.Request) -> str:
    """Of the address that the request was sent to."""
    try:
        return host_port.split_address(request.host)[0]
    except ValueError:
        return request.host.strip("[]")


def closing(response: web.Response) -> web.Response:
    """An answer after which the connection ends; the header alone would not end it."""
    response.force_close()
    response.headers[hdrs.CONNECTION] = "close"
    return response


def _refused(status: int, why: str, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(status=status, text=why + "\n", headers=HEADERS | (headers or {}))
