"""Which address of this machine a rank tells the others."""

from __future__ import annotations

import asyncio
import getpass
import os
import socket
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from spare_megatron.cli import drain
from spare_megatron.collectives.interface import advertised, own_address, own_host
from spare_megatron.config.errors import ConfigError
from spare_megatron.control_plane import control_pb2 as pb
from spare_megatron.control_plane.channel import COORDINATOR, Security, serve
from spare_megatron.launch import coordinator_client
from spare_megatron.runtime.run_directory import RunDirectory


def _nobody() -> str:
    raise AssertionError("the coordinator is not asked for")


@pytest.fixture(autouse=True)
def _two_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    def address(family: int, text: str) -> SimpleNamespace:
        return SimpleNamespace(family=family, address=text)

    known = {
        "eth0": [address(socket.AF_INET6, "fe80::1%eth0"), address(socket.AF_INET, "192.168.0.5")],
        "ib0": [address(socket.AF_INET, "10.1.2.3"), address(socket.AF_INET6, "fd00::3")],
        "down0": [],
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: known)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)


def test_an_interface_is_named_or_found_by_its_network(monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_address("ib0", _nobody) == "10.1.2.3"
    assert own_address("10.1.0.0/16", _nobody) == "10.1.2.3"
    assert own_address("fd00::/8", _nobody) == "fd00::3"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0,ib0")
    assert own_address("", _nobody) == "192.168.0.5"
    assert own_address("ib0", _nobody) == "10.1.2.3", "the flag comes before the variable"


def test_without_a_choice_it_is_the_one_on_the_way_to_the_coordinator() -> None:
    assert own_address("", lambda: "127.0.0.1") == "127.0.0.1"


@pytest.mark.parametrize(
    ("interface", "sentence"),
    [
        ("eth7", "--spare-interface names eth7, which has no address on .*; the interfaces are eth0, ib0"),
        ("down0", "--spare-interface names down0, which has no address"),
        ("172.16.0.0/12", "172.16.0.0/12: this machine, .*, has no address in that network; .*eth0 192.168.0.5, "),
        ("10.1.0.0/99", "10.1.0.0/99 is no network: .*give a name"),
    ],
)
def test_one_that_does_not_exist_is_named_with_those_that_do(interface: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        own_address(interface, _nobody)


def test_a_name_that_leads_nowhere_or_elsewhere_is_said_before_anything_is_sent_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks would die of it one after the other, each with an error of its own."""
    monkeypatch.setattr(socket, "gethostname", lambda: "node7")

    def leads_to(*places: str) -> None:
        found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (place, 0)) for place in places]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)

    leads_to("127.0.0.1")
    assert own_host() == advertised("0.0.0.0:0") == advertised("[::]:29500") == "node7"
    assert own_host("ib0") == "10.1.2.3"
    assert advertised("10.0.0.7:29500") == "10.0.0.7"
    leads_to("127.0.0.1", "203.0.113.9")
    with pytest.raises(ConfigError, match=r"node7, leads to 203.0.113.9, which is none of its own addresses; give an"):
        own_host()

    def nowhere(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", nowhere)
    with pytest.raises(ConfigError, match=r"node7, has no address \(Name or service not known\); give an address"):
        advertised("0.0.0.0:0")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert advertised("0.0.0.0:0") == "192.168.0.5"


def test_why_nobody_can_listen_is_said_as_it_is() -> None:
    async def serve_at(listen: str) -> None:
        await serve(listen, COORDINATOR, Security("token"), _none, pb.GroupReport)

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127.0.0.1:{port}: Address already in use; use port 0"):
            asyncio.run(serve_at(f"127.0.0.1:{port}"))
    with pytest.raises(ConfigError, match=r"203.0.113.9:0: Cannot assign .*; 203.0.113.9 is none of the addresses of"):
        asyncio.run(serve_at("203.0.113.9:0"))


async def _none(*_: object) -> None:
    pass


def test_who_drains_may_have_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def nameless() -> str:
        raise KeyError("getpwuid(): uid not found: 54321")

    monkeypatch.setattr(getpass, "getuser", nameless)
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    assert drain.user() == "user 54321"


def test_a_coordinator_that_does_not_answer_is_asked_to_stop_in_another_way(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its address may lead nowhere; the launcher then has nobody to ask, and the job would never end."""
    monkeypatch.setattr(coordinator_client, "ANSWER_S", 0.05)

    async def main() -> None:
        over, reported = False, asyncio.Event()
        client = coordinator_client.CoordinatorClient(RunDirectory(tmp_path), Security("token"), lambda: over)
        client.request_stop("signal SIGTERM", reported.set)
        await asyncio.wait_for(reported.wait(), 10.0)
        client.close()

    asyncio.run(main())
