"""Groups in network namespaces of their own, joined by a switch of this process that loses frames on order.

What a relay of TCP connections cannot show is here: lost packets are sent again by the kernels, acknowledgements are
lost too, and connections do not come about. Needs root.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import random
import select
import shutil
import socket
import struct
import subprocess
import threading
from collections.abc import Callable

SIOCETHTOOL = 0x8946
OFFLOADS = (0x17, 0x1F, 0x24)
"""ETHTOOL_STXCSUM, ETHTOOL_STSO, ETHTOOL_SGSO: frames are to be whole, each in itself."""
SOL_PACKET, PACKET_ADD_MEMBERSHIP, PACKET_MR_PROMISC = 263, 1, 1
PACKET_IGNORE_OUTGOING = 23
HOST = 254
"""The port of this process, which nothing happens to."""


def unusable() -> str:
    """Why there can be no namespaces here; empty where there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "there is no program ip"
    name = f"spare-{os.getpid()}-try"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if tried.returncode:
        return f"no network namespaces: {tried.stderr.strip()}"
    pair = ["ip", "link", "add", f"sp{os.getpid()}", "type", "veth", "peer", "name", "eth0", "netns", name]
    paired = subprocess.run(pair, capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], check=True)
    return f"no veth devices: {paired.stderr.strip()}" if paired.returncode else ""


class Switch:
    """Namespaces 0..n-1 and the host, each at its port."""

    def __init__(self, groups: int, seed: int) -> None:
        self.lost: Callable[[int, int], bool] = lambda sender, receiver: False
        """Whether a frame between two groups is lost."""
        self.rng = random.Random(seed)
        self._net = f"10.{200 + os.getpid() % 50}.{os.getpid() // 50 % 250}"
        self._groups = range(groups)
        self._ports: dict[int, socket.socket] = {}
        self._wake = os.eventfd(0)
        self._thread: threading.Thread | None = None
        try:
            for port in (*self._groups, HOST):
                self._plug(port)
        except BaseException:
            self.close()
            raise
        self._thread = threading.Thread(target=self._run, name="switch")
        self._thread.start()

    @property
    def host(self) -> str:
        return self.address(HOST)

    def address(self, port: int) -> str:
        return f"{self._net}.{port + 1 if port != HOST else HOST}"

    def command(self, group: int) -> list[str]:
        """What to put before a command that is to run in the group's namespace."""
        return ["ip", "netns", "exec", self._name(group)]

    def close(self) -> None:
        if self._thread is not None:
            os.eventfd_write(self._wake, 1)
            self._thread.join()
        for sock in self._ports.values():
            sock.close()
        os.close(self._wake)
        for group in self._groups:
            subprocess.run(["ip", "netns", "del", self._name(group)], capture_output=True)
        for port in (*self._groups, HOST):
            subprocess.run(["ip", "link", "del", self._device(port)], capture_output=True)

    def _plug(self, port: int) -> None:
        device, end = self._device(port), f"{self._device(port)}e"
        _ip("link", "add", device, "type", "veth", "peer", "name", end)
        _ip("link", "set", end, "address", f"02:00:00:00:00:{port:02x}")
        for one in (device, end):
            _switch_offloads_off(one)
        _ip("link", "set", device, "up")
        inside: tuple[str, ...] = ()
        if port != HOST:
            _ip("netns", "add", self._name(port))
            _ip("link", "set", end, "netns", self._name(port))
            inside = ("-n", self._name(port))
            _ip(*inside, "link", "set", "lo", "up")
        _ip(*inside, "addr", "add", f"{self.address(port)}/24", "dev", end)
        _ip(*inside, "link", "set", end, "up")
        sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
        sock.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        sock.bind((device, 0))
        index = socket.if_nametoindex(device)
        sock.setsockopt(SOL_PACKET, PACKET_ADD_MEMBERSHIP, struct.pack("iHH8s", index, PACKET_MR_PROMISC, 0, b""))
        sock.setblocking(False)
        self._ports[port] = sock

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        at = {sock.fileno(): port for port, sock in self._ports.items()}
        for fd in at:
            poller.register(fd, select.POLLIN)
        while True:
            for fd, _ in poller.poll():
                if fd == self._wake:
                    return
                for _ in range(64):
                    try:
                        self._switch(at[fd], self._ports[at[fd]].recv(65536))
                    except BlockingIOError:
                        break

    def _switch(self, sender: int, frame: bytes) -> None:
        receivers = [frame[5]] if frame[0] == 2 else [port for port in self._ports if port != sender]
        for receiver in receivers:
            if receiver in self._ports and (HOST in (sender, receiver) or not self.lost(sender, receiver)):
                try:
                    self._ports[receiver].send(frame)
                except OSError:
                    continue  # a full queue loses frames, as a switch does

    def _name(self, group: int) -> str:
        return f"spare-{os.getpid()}-{group}"

    def _device(self, port: int) -> str:
        return f"sp{os.getpid()}p{port}"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def _switch_offloads_off(device: str) -> None:
    with socket.socket() as sock:
        for command in OFFLOADS:
            value = ctypes.create_string_buffer(struct.pack("II", command, 0))
            fcntl.ioctl(sock, SIOCETHTOOL, struct.pack("16sP16x", device.encode(), ctypes.addressof(value)))
