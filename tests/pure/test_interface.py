"""Which address of this machine a rank tells the others."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import psutil
import pytest

from spare_megatron.collectives.interface import own_address
from spare_megatron.config.errors import ConfigError


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
