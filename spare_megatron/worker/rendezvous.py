"""The store in which the ranks of one group meet to form their world: position 0 serves it, and writes its address into
the run directory.

A group's world lives and dies with its ranks, so one of them may serve its store.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from spare_megatron.collectives.handshake import Identity, Member
from spare_megatron.collectives.interface import own_host
from spare_megatron.config.errors import ConfigError
from spare_megatron.config.place import Place
from spare_megatron.runtime.disk import with_retries
from spare_megatron.runtime.run_directory import RunDirectory, glance, write_json
from spare_megatron.worker.group_store import GroupStore, StoreClient, StoreGoneError, keep
from spare_megatron.worker.store_server import StoreServer

POLL_S = 0.05
_servers: list[StoreServer] = []
"""The stores that this process serves until it ends, for the ranks of its group use them as long as they live."""


def group_store(place: Place, timeout_s: float, interface: str = "") -> GroupStore:
    """The store in which the ranks of a group, or of a standby, meet; position 0 serves it, on the given interface.

    Raises:
        ConfigError: position 0 did not appear in time, or there is no such interface.
    """
    run_dir = RunDirectory(str(place.run_dir))
    directory = run_dir.path / "leaders"
    with_retries(lambda: directory.mkdir(parents=True, exist_ok=True))
    number = place.home.rpartition(" ")[2]
    path = directory / (f"standby-{number}-store.json" if place.place_file else f"group-{number}-store.json")
    store_number = 1 + int(number) if place.place_file else 0

    def connect(address: str) -> GroupStore:
        return keep(GroupStore(StoreClient(_store_of(place, run_dir.token()), address, store_number, timeout_s)))

    if place.is_leader:
        me = _store_of(place, run_dir.token(create=True))
        host = _store_host(interface)
        try:
            server = StoreServer(me, host, store_number)
        except OSError as error:
            raise ConfigError(
                f"the store of {place.home} cannot listen on {host}: {error.strerror}; name an address of this machine"
            ) from None
        _servers.append(server)
        address = server.address
        with_retries(lambda: write_json(path, {"incarnation": place.incarnation, "address": address}), timeout_s)
        return connect(address)
    return _store_of_leader(path, place, timeout_s, connect)


def on_one_host(store: GroupStore, place: Place) -> bool:
    """Whether all ranks of the group share one network, that of their host. Collective."""
    store.set(f"host/{place.position}", _network())
    if place.is_leader:
        there = {store.get(f"host/{position}") for position in range(place.group_size)}
        store.set("one host", str(int(len(there) == 1)))
    return store.get("one host") == b"1"


def _network() -> str:
    """Identifies the network in which 127.0.0.1 is the same for all: this host's boot and this process's network
    namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    host = boot.read_text().strip() if boot.exists() else socket.gethostname()
    try:
        return f"{host} {os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return f"{host} {socket.gethostname()}"


def _store_of(place: Place, token: str) -> Identity:
    return Identity(Member(place.group, place.incarnation), 0, place.job_attempt, token)


def _store_of_leader(path: Path, place: Place, timeout_s: float, connect: Callable[[str], GroupStore]) -> GroupStore:
    """A connection to the store that position 0 serves, once it does. Until then the file may have the address of an
    earlier start of the same incarnation, which ended before any coordinator knew it: nothing of it answers there."""
    deadline_s, found = time.monotonic() + timeout_s, ""
    while time.monotonic() < deadline_s:
        record = glance(path)
        if record is not None and record["incarnation"] == place.incarnation:
            try:
                return connect(str(record["address"]))
            except StoreGoneError as error:
                found = f" ({error})"
        time.sleep(POLL_S)
    raise ConfigError(
        f"position 0 of {place.home} did not appear in {path.parent} within {timeout_s:g} s{found}; "
        "see its log, and whether all ranks share the run directory"
    )


def _store_host(interface: str) -> str:
    """The host at which other hosts of the group reach the store. If this machine's name has no usable address, it is
    the loopback address, which is sufficient if all ranks are on this machine."""
    if interface:
        return own_host(interface)
    try:
        return own_host()
    except ConfigError:
        return "127.0.0.1"
