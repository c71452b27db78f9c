"""A group's store: as torch's stores for those that know the token, and beside clients that die, stop or babble."""

from __future__ import annotations

import contextlib
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from spare_megatron.collectives.handshake import STRANGERS_MAX, Identity, Member
from spare_megatron.config.host_port import split_address
from spare_megatron.config.place import Place
from spare_megatron.runtime.run_directory import RunDirectory, write_json
from spare_megatron.worker import store_messages
from spare_megatron.worker.group_store import GroupStore, StoreClient, StoreGoneError, StoreTimeoutError
from spare_megatron.worker.rendezvous import group_store
from spare_megatron.worker.store_server import StoreServer
from tests.spawn import ROOT, environment

BOUND_S = 5.0
"""A blocked store does not answer before its client is continued, which these tests never do in time."""
ME = Identity(Member(3, 1), 0, 2, "secret")
CLIENTS = """
import sys, threading
from spare_megatron.collectives.handshake import Identity, Member
from spare_megatron.worker.group_store import StoreClient

def client(action):
    store = StoreClient(Identity(Member(3, 1), 0, 2, "secret"), sys.argv[1], timeout_s=60.0)
    store.set(action, b"x" * 100_000)
    up.wait()
    if action == "wait":
        store.get("never")
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
    server = StoreServer(ME, "127.0.0.1")
    yield server
    server.close()


def connected(server: StoreServer) -> socket.socket:
    host, port = split_address(server.address)
    return socket.create_connection((host, port), BOUND_S)


# ------------------------------------------------------------------------------------------------- as torch's stores


OPERATIONS = st.one_of(
    st.tuples(st.just("set"), st.sampled_from("ab"), st.sampled_from(["1", "2", "x"])),
    st.tuples(st.just("add"), st.sampled_from("cd"), st.integers(-3, 3)),
    st.tuples(st.just("compare_set"), st.sampled_from("abe"), st.sampled_from(["", "1", "x"]), st.just("2")),
    st.tuples(st.just("delete_key"), st.sampled_from("abcde")),
    st.tuples(st.just("append"), st.sampled_from("ab"), st.sampled_from(["", "7"])),
    st.tuples(st.just("check"), st.lists(st.sampled_from("abcde"), min_size=1, max_size=3)),
    st.tuples(st.just("multi_set"), st.just(["a", "b"]), st.just(["3", "4"])),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(OPERATIONS, max_size=25))
def test_it_does_what_a_store_of_torch_does(operations: list[tuple[Any, ...]]) -> None:
    server = StoreServer(ME, "127.0.0.1")
    torchs = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ours = GroupStore(StoreClient(ME, server.address, timeout_s=BOUND_S))
    present = torchs.num_keys()
    try:
        for name, *arguments in operations:
            assert getattr(ours, name)(*arguments) == getattr(torchs, name)(*arguments), (name, arguments)
            assert ours.num_keys() == torchs.num_keys() - present
        for key in "abcde":
            if torchs.check([key]):
                assert ours.get(key) == torchs.get(key)
    finally:
        ours.client.close()
        server.close()


def test_whoever_waits_is_answered_when_all_keys_are_there(server: StoreServer) -> None:
    """In whatever order they come, and others before it is."""
    waiting = GroupStore(StoreClient(ME, server.address, timeout_s=BOUND_S))
    other = GroupStore(StoreClient(ME, server.address, timeout_s=BOUND_S))
    reported: list[list[bytes]] = []
    thread = threading.Thread(target=lambda: reported.append(waiting.multi_get(["a", "b", "c"])))
    thread.start()
    for key in "cab":
        time.sleep(0.02)
        assert not reported
        other.set(key, key * 3)
    thread.join(BOUND_S)
    assert reported == [[b"aaa", b"bbb", b"ccc"]]


def test_a_wait_ends_in_time_and_the_connection_serves_on(server: StoreServer) -> None:
    store = GroupStore(StoreClient(ME, server.address, timeout_s=0.2))
    with pytest.raises(StoreTimeoutError, match=r"never did not come into the group's store within 0\.2 s"):
        store.get("never")
    with pytest.raises(StoreTimeoutError, match=r"within 0.1 s"):
        store.wait(["a", "never"], timedelta(seconds=0.1))
    store.set("never", "now")
    assert store.get("never") == b"now"


def test_waits_end_when_the_store_does() -> None:
    server = StoreServer(ME, "127.0.0.1")
    store = StoreClient(ME, server.address, timeout_s=60.0)
    closed: list[float] = []

    def close() -> None:
        time.sleep(0.1)
        closed.append(time.monotonic())
        server.close()

    thread = threading.Thread(target=close)
    thread.start()
    with pytest.raises(StoreGoneError):
        store.get("never")
    thread.join()
    assert time.monotonic() - closed[0] < 1.0
    with pytest.raises(StoreGoneError, match=r"no store of this group answers at 127\.0\.0\.1"):
        StoreClient(ME, server.address)


# -------------------------------------------------------------------------------------------------------- bad company


@pytest.mark.parametrize(
    "who",
    [
        Identity(Member(3, 1), 0, 2, "guess"),
        Identity(Member(4, 1), 0, 2, "secret"),
        Identity(Member(3, 0), 0, 2, "secret"),
        Identity(Member(3, 1), 0, 1, "secret"),
    ],
)
def test_only_ranks_of_this_group_job_attempt_and_token_are_received(server: StoreServer, who: Identity) -> None:
    with pytest.raises(StoreGoneError, match="no store of this group answers"):
        StoreClient(who, server.address, timeout_s=BOUND_S)
    with pytest.raises(StoreGoneError):
        StoreClient(ME, server.address, number=1, timeout_s=BOUND_S)


def test_clients_that_stop_or_die_in_the_middle_of_a_request_hurt_nobody(server: StoreServer) -> None:
    rng = random.Random(19)
    print("seed 19")
    check_vector = StoreClient(ME, server.address, timeout_s=BOUND_S)
    clients = subprocess.Popen(
        [sys.executable, "-c", CLIENTS, server.address], cwd=ROOT, env=environment(), stdout=subprocess.PIPE
    )
    try:
        assert clients.stdout is not None
        assert clients.stdout.readline() == b"up\n"
        for _ in range(20):
            time.sleep(rng.uniform(0.01, 0.05))  # the moment is what is random here
            clients.send_signal(signal.SIGSTOP)
            _answers(check_vector)
            clients.send_signal(signal.SIGCONT)
    finally:
        clients.kill()
        clients.wait()
        assert clients.stdout is not None
        clients.stdout.close()
    _answers(StoreClient(ME, server.address, timeout_s=BOUND_S))


def test_strangers_get_a_challenge_and_nothing_else(server: StoreServer) -> None:
    """What TCPStore's protocol would be, random bytes, and silence; many more than there is room for."""
    rng = random.Random(7)
    print("seed 7")
    silent = []
    for number in range(3 * STRANGERS_MAX):
        stranger = connected(server)
        silent.append(stranger)
        if number % 3 == 0:
            with contextlib.suppress(ConnectionError):  # it was turned away already
                stranger.sendall(rng.randbytes(rng.randint(1, 5000)))
    store = StoreClient(ME, server.address, timeout_s=BOUND_S)
    _answers(store)
    assert store.ask(store_messages.Op.COUNT, []) == (b"1",)
    for stranger in silent:
        stranger.close()


@pytest.mark.parametrize("place_file", ["", "standbys/standby-0.json"])
def test_ranks_meet_where_an_earlier_start_of_the_same_incarnation_left_its_address(
    tmp_path: Path, place_file: str
) -> None:
    """spare-launch was killed before the coordinator knew its groups, and is started again."""
    run_dir = RunDirectory(tmp_path)
    run_dir.token(create=True)
    places = [Place(0, position, 1, 0, str(tmp_path), "spare-launch", 2, place_file=place_file) for position in (0, 1)]
    file = "standby-0-store.json" if place_file else "group-0-store.json"
    (tmp_path / "leaders").mkdir()
    write_json(tmp_path / "leaders" / file, {"incarnation": 0, "address": "127.0.0.1:9"})
    with ThreadPoolExecutor(1) as other:
        late = other.submit(group_store, places[1], 30.0)
        time.sleep(0.2)
        assert not late.done()
        group_store(places[0], 30.0).set("key", "value")
        assert late.result().get("key") == b"value"


def test_a_store_listens_on_its_own_address_only(server: StoreServer) -> None:
    _, port = split_address(server.address)
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", port), 1.0)


# ------------------------------------------------------------------------------------------------------------- words


FIELDS = st.lists(st.binary(max_size=20), max_size=4).map(tuple)


@given(st.sampled_from(list(store_messages.Op)), FIELDS, FIELDS, st.integers(0, 10**9))
def test_requests_and_answers_are_read_as_they_were_meant(
    op: store_messages.Op, keys: tuple[bytes, ...], values: tuple[bytes, ...], timeout_ms: int
) -> None:
    request = store_messages.Request(op, keys, values, timeout_ms / 1e3)
    words = store_messages.pack_request(request)
    assert store_messages.body_bytes(words) == len(words) - store_messages.HEADER_BYTES
    assert store_messages.read_request(words) in (request, None)
    if op is store_messages.Op.SET and keys:
        request = store_messages.Request(op, keys, keys, timeout_ms / 1e3)
        assert store_messages.read_request(store_messages.pack_request(request)) == request
    assert store_messages.read_answer(
        store_messages.pack_answer(store_messages.Answer(1, values))
    ) == store_messages.Answer(1, values)


@given(st.binary(min_size=store_messages.HEADER_BYTES, max_size=200))
def test_no_bytes_raise(words: bytes) -> None:
    assert (store_messages.body_bytes(words) or 0) >= 0
    assert (
        store_messages.read_request(words) is None
        or store_messages.pack_request(store_messages.read_request(words)) is not None
    )  # type: ignore[arg-type]
    assert store_messages.read_answer(words) is None or store_messages.read_answer(words)


def _answers(client: StoreClient) -> None:
    """Within the client's time-out; else the client raises."""
    client.set("key", b"value")
    assert client.get("key") == b"value"
