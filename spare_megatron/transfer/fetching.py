"""One fetch: the headers of all donors, which must be equal, then their parts, with one thread for each donor."""

from __future__ import annotations

import json
import queue
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch

from spare_megatron.transfer.fetch_client import PartHeader, StateFetchClient
from spare_megatron.transfer.snapshot_shards import ReceiveBuffer, read_header
from spare_megatron.transfer.transport import FetchError, FetchOverError, SnapshotShard

LOOK_S = 0.1
"""How often ``over`` is asked."""
Made = TypeVar("Made")


def fetch_snapshot_shard(
    clients: Sequence[StateFetchClient],
    step: int,
    place: Callable[[SnapshotShard], Mapping[str, torch.Tensor]],
    over: Callable[[], bool],
) -> SnapshotShard:
    """See :meth:`spare_megatron.transfer.transport.StateTransport.fetch`. Whatever it raises, the clients have been
    stopped, and nothing writes into the tensors any more."""
    assert clients, "a snapshot shard comes from at least one donor"
    try:
        reported = _together([partial(one.header, step) for one in clients], clients, over)
        snapshot_shard = _agreed(clients, reported, step)
        tensors = place(snapshot_shard)
        _check_place(snapshot_shard, tensors)
        buffers = [ReceiveBuffer(tensors, number, len(clients)) for number in range(len(clients))]
        works = [partial(one.take, buffer) for one, buffer in zip(clients, buffers, strict=True)]
        _together(works, clients, over)
        return SnapshotShard({name: tensors[name] for name in snapshot_shard.tensors}, snapshot_shard.values)
    except BaseException:
        for one in clients:
            one.stop()
            one.close()
        raise


def _together(
    works: Sequence[Callable[[], Made]], clients: Sequence[StateFetchClient], over: Callable[[], bool]
) -> list[Made]:
    """Run each client's work in a thread; returns the results in order. When one fails, or ``over()``, all end."""
    done: queue.SimpleQueue[tuple[int, Made | Exception]] = queue.SimpleQueue()

    def run(number: int) -> None:
        try:
            done.put((number, works[number]()))
        except Exception as error:
            done.put((number, error))

    threads = [
        threading.Thread(target=run, args=(number,), name=f"transfer-from-{one.source.member.group}", daemon=True)
        for number, one in enumerate(clients)
    ]
    made: dict[int, Made] = {}
    for thread in threads:
        thread.start()
    try:
        while len(made) < len(works):
            if over():
                raise FetchOverError("nobody wants the snapshot shard any more")
            try:
                number, found = done.get(timeout=LOOK_S)
            except queue.Empty:
                continue
            if isinstance(found, Exception):
                raise found
            made[number] = found
    except BaseException:
        for one in clients:
            one.stop()
        raise
    finally:
        for thread in threads:
            thread.join()
    return [made[number] for number in range(len(works))]


def _agreed(clients: Sequence[StateFetchClient], reported: Sequence[PartHeader], step: int) -> SnapshotShard:
    """The snapshot shard that the headers of all donors describe. Raises FetchError."""
    for number, (one, received) in enumerate(zip(clients, reported, strict=True)):
        if (received.part, received.parts) != (number, len(clients)):
            raise FetchError(
                f"{one.donor}, serves part {received.part} of {received.parts} of step {step}, but it is asked for "
                f"part {number} of {len(clients)}"
            )
    usual, _ = Counter(received.header for received in reported).most_common(1)[0]
    for one, received in zip(clients, reported, strict=True):
        if received.header != usual:
            raise FetchError(
                f"{one.donor}, describes another snapshot shard of step {step} than others: "
                f"{_unlike(received.header, usual)}"
            )
    try:
        return read_header(usual)
    except ValueError as error:
        raise FetchError(f"{clients[0].donor}, serves step {step} in an unknown way: {error}") from error


def _unlike(one: bytes, other: bytes) -> str:
    """What of two headers differs first."""
    try:
        pair = json.loads(one), json.loads(other)
        for kind in ("tensors", "values"):
            mine, usual = (dict(_named(header[kind])) for header in pair)
            for name in sorted(mine.keys() | usual.keys()):
                if mine.get(name) != usual.get(name):
                    return f"{name} is {str(mine.get(name))[:100]}, not {str(usual.get(name))[:100]}"
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    return "its header"


def _named(entries: object) -> list[tuple[str, object]]:
    if isinstance(entries, dict):
        return list(entries.items())
    assert isinstance(entries, list)
    return [(name, rest) for name, *rest in entries]


def _check_place(snapshot_shard: SnapshotShard, tensors: Mapping[str, torch.Tensor]) -> None:
    if tensors.keys() != snapshot_shard.tensors.keys():
        unlike = sorted(tensors.keys() ^ snapshot_shard.tensors.keys())
        raise ValueError(f"the tensors to fill are not those of the snapshot shard: {unlike[:10]} are of one only")
    for name, reported in snapshot_shard.tensors.items():
        given = tensors[name]
        if (given.dtype, given.shape) != (reported.dtype, reported.shape) or not given.is_contiguous():
            raise ValueError(
                f"tensor {name} to fill is {given.dtype} {tuple(given.shape)}, strides {given.stride()}; give a "
                f"contiguous one of {reported.dtype} {tuple(reported.shape)}"
            )
