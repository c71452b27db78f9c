"""The store beside clients that die, stop or babble."""

from __future__ import annotations

import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from spare_megatron.collectives.store import StoreServer, connect
from spare_megatron.config.errors import ConfigError
from tests.spawn import ROOT, environment

pytestmark = pytest.mark.beside_others
BOUND_S = 5.0
"""A blocked store does not answer before its client is continued, which these tests never do in time."""
CLIENTS = """
import sys, threading
from datetime import timedelta
from spare_megatron.collectives.store import connect

def client(action):
    store = connect("127.0.0.1", int(sys.argv[1]), 60.0)
    store.set(action, b"x" * 100_000)
    up.wait()
    if action == "wait":
        store.wait(["never"], timedelta(seconds=60))
    while action == "get":
        store.get("get")
    value = b"y" * 8_000_000  # more than the system sends by itself for a stopped process
    while True:
        store.set(action, value)

up = threading.Barrier(4)
for action in ("wait", "get", "set"):
    threading.Thread(target=client, args=(action,), daemon=True).start()
up.wait()
print("up", flush=True)
threading.Event().wait(60)
"""


@pytest.fixture
def server() -> Iterator[StoreServer]:
    server = StoreServer("127.0.0.1")
    yield server
    server.close()


def test_clients_that_stop_or_die_in_the_middle_of_a_request_hurt_nobody(server: StoreServer) -> None:
    rng = random.Random(19)
    print("seed 19")
    witness = connect(server.host, server.port, BOUND_S)
    clients = subprocess.Popen(
        [sys.executable, "-c", CLIENTS, str(server.port)], cwd=ROOT, env=environment(), stdout=subprocess.PIPE
    )
    try:
        assert clients.stdout is not None
        assert clients.stdout.readline() == b"up\n"
        for _ in range(20):
            time.sleep(rng.uniform(0.01, 0.05))  # the moment is what is random here
            clients.send_signal(signal.SIGSTOP)
            _answers(witness)
            clients.send_signal(signal.SIGCONT)
    finally:
        clients.kill()
        clients.wait()
        assert clients.stdout is not None
        clients.stdout.close()
    _answers(connect(server.host, server.port, BOUND_S))


def test_garbage_hurts_nobody(server: StoreServer) -> None:
    rng = random.Random(7)
    for _ in range(20):
        with socket.create_connection((server.host, server.port)) as stranger:
            stranger.sendall(rng.randbytes(rng.randint(1, 5000)))
    _answers(connect(server.host, server.port, BOUND_S))


def test_a_store_listens_on_its_own_address_only(server: StoreServer) -> None:
    with pytest.raises(ConnectionError, match="no store answers"):
        connect("127.0.0.2", server.port, 1.0)


def test_a_port_in_use_is_named(server: StoreServer) -> None:
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{server.port}: .*free port"):
        StoreServer("127.0.0.1", server.port)


def _answers(client: dist.TCPStore) -> None:
    """Within the client's time-out; else the client raises."""
    client.set("key", "value")
    assert client.get("key") == b"value"
