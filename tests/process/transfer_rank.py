"""Ranks that give and take snapshot shards: several in the test's process, or one in a process of its own, with a line
of JSON for each command and each answer."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from spare_megatron.collectives.handshake import Identity, Member
from spare_megatron.transfer.socket_transport import SocketTransport
from spare_megatron.transfer.transport import SnapshotShard, Source
from tests import preloaded
from tests.polling import until
from tests.spawn import environment

OFFER = 7
LEARNER = Member(3, 1)
PATIENCE_S = 60.0
"""A time-out that only a hang reaches."""
STEP = 4
wait_for = partial(until, "what a transfer does", timeout_s=PATIENCE_S, every_s=0.005)


def snapshot_shard_of(seed: int, kib: int) -> SnapshotShard:
    """Some ``kib`` of tensors of all kinds."""
    random = torch.Generator().manual_seed(seed)
    halves = torch.randn(kib << 7, generator=random)
    tensors = {
        "weights": torch.randn(kib << 7, generator=random).view(-1, 16),
        "halves": halves.bfloat16(),
        "counts": torch.randint(-9, 9, (kib << 4, 2), generator=random),
        "flags": halves[:1001] > 0,
        "scalar": torch.tensor(float(seed)),
        "nothing": torch.empty(0, 4),
    }
    return SnapshotShard(tensors, {"step": seed, "scale": 0.1 * seed, "lr": [1e-310, -0.0]})


def empty_like(snapshot_shard: SnapshotShard) -> Mapping[str, torch.Tensor]:
    return {name: torch.empty_like(one, device="cpu") for name, one in snapshot_shard.tensors.items()}


def equal(one: SnapshotShard, other: SnapshotShard) -> bool:
    if one.values != other.values or one.tensors.keys() != other.tensors.keys():
        return False
    return all(torch.equal(one.tensors[name], other.tensors[name]) for name in one.tensors)


class Ranks:
    """Transports of this process, and fetches in threads of their own."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor()
        self._all: list[SocketTransport] = []
        self._end = threading.Event()

    def rank(
        self, group: int, timeout_s: float = PATIENCE_S, rate_bytes_s: float = 0, **who: object
    ) -> SocketTransport:
        who = {"member": Member(group), "token": "secret", **who}
        self._all.append(SocketTransport(Identity(**who), "127.0.0.1", timeout_s, rate_bytes_s))
        return self._all[-1]

    def donor(
        self, group: int = 0, part: int = 0, parts: int = 1, kib: int = 100, **options: object
    ) -> SocketTransport:
        """A donor with the state after STEP."""
        donor = self.rank(group, **options)
        donor.open(OFFER, LEARNER, part, parts)
        donor.put(OFFER, STEP, snapshot_shard_of(STEP, kib))
        return donor

    def learner(self, timeout_s: float = PATIENCE_S, **who: object) -> SocketTransport:
        return self.rank(3, timeout_s, **{"member": LEARNER, **who})

    def begin(
        self,
        learner: SocketTransport,
        sources: Sequence[Source],
        step: int = STEP,
        over: Callable[[], bool] = lambda: False,
        number: int = OFFER,
    ) -> Future[SnapshotShard]:
        def ends() -> bool:
            return self._end.is_set() or over()

        return self._pool.submit(learner.fetch, number, step, sources, empty_like, ends)

    def close(self) -> None:
        self._end.set()
        for one in self._all:
            one.close()
        self._pool.shutdown()


def source(donor: SocketTransport, group: int = 0) -> Source:
    return Source(Member(group), donor.address)


class TransferProcess:
    """A real process. Killed when the with block is left."""

    def __init__(self, group: int, timeout_s: float = PATIENCE_S, rate_bytes_s: float = 0) -> None:
        words = [str(group), str(timeout_s), str(rate_bytes_s)]
        self.process = preloaded.PipedProcess("tests.process.transfer_rank", words, environment())
        self.member = Member(group)
        self._address = ""

    def __enter__(self) -> TransferProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.close()

    @property
    def source(self) -> Source:
        """Waits for the start of the process."""
        self._address = self._address or self._receive()
        return Source(self.member, self._address)

    def tell(self, what: str, *arguments: Any) -> Any:
        """One command, and its answer."""
        assert self.source.address
        assert self.process.stdin
        self.process.stdin.write(json.dumps([what, *arguments]) + "\n")
        self.process.stdin.flush()
        return self._receive()

    def _receive(self) -> Any:
        assert self.process.stdout
        return json.loads(self.process.stdout.readline())


def _memory_kib(kind: str) -> int:
    """VmRSS: what this process has; VmHWM: the most that it had since :func:`_begin_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(kind))


def _begin_peak() -> int:
    """Forget the peak so far; what the process has now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _memory_kib("VmRSS")


def _open(transport: SocketTransport, number: int, learner: list[int], part: int, parts: int) -> None:
    transport.open(number, Member(*learner), part, parts)


def _put(transport: SocketTransport, number: int, step: int, kib: int) -> int:
    """Returns by how much the peak of this process's memory grew."""
    snapshot_shard = snapshot_shard_of(step, kib)
    before_kib = _begin_peak()
    transport.put(number, step, snapshot_shard)
    return _memory_kib("VmHWM") - before_kib


def _fetch(transport: SocketTransport, number: int, step: int, kib: int, source: list[Any]) -> tuple[int, bool]:
    """Returns by how much the peak of this process's memory grew, and whether the snapshot shard is right."""
    wanted = snapshot_shard_of(step, kib)
    places = {name: torch.ones_like(one) for name, one in wanted.tensors.items()}
    before_kib = _begin_peak()
    found = transport.fetch(
        number, step, [Source(Member(*source[0]), source[1])], lambda reported: places, lambda: False
    )
    grown_kib = _memory_kib("VmHWM") - before_kib
    return grown_kib, equal(found, wanted)


def _kept(transport: SocketTransport, number: int) -> int:
    return len(transport.kept(number).sizes)


def _main(group: str, timeout_s: str, rate_bytes_s: str) -> None:
    torch.set_num_threads(1)
    me = Identity(Member(int(group)), token="secret")
    transport = SocketTransport(me, "127.0.0.1", float(timeout_s), float(rate_bytes_s))
    print(json.dumps(transport.address), flush=True)
    commands = {"open": _open, "put": _put, "fetch": _fetch, "kept": _kept}
    for line in sys.stdin:
        what, *arguments = json.loads(line)
        print(json.dumps(commands[what](transport, *arguments)), flush=True)
    transport.close()


if __name__ == "__main__":
    _main(*sys.argv[1:])
