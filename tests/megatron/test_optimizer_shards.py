"""State shards of real optimizers: each element that an optimizer has is in exactly one shard, in the order of the
buffers, and a flipped bit changes the digest of that shard alone, and names it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest

from spare_megatron.control_plane.group_aggregation import first_part
from tests.megatron.test_parity import MOE, SEED
from tests.megatron.test_transferred_state import SHARDS, SPLIT, one_group
from tests.spawn import run_ranks

FLIPS = 12
FIELD = 1 << 20
"""More than the elements of any buffer here; fp32 has the numbers of eight buffers exactly."""
SHARED = {
    "D2, split, bf16": one_group({"bf16": True}, inner_data=2, reduce="exact", optimizer=SPLIT),
    "D2, EP2, split": one_group(MOE, inner_data=2, expert=2, reduce="exact32", optimizer=SPLIT),
    "D2, not split": one_group({}, inner_data=2, reduce="exact"),
    "PP2, virtual stages, bf16": one_group({"bf16": True, "num_layers": 4}, pipeline=2, virtual=2, reduce="exact"),
}
"""Groups of both processes."""
ALONE = {
    "bf16, tied": one_group({"bf16": True}, reduce="exact"),
    "fp32": one_group({}, reduce="exact"),
    "SGD": one_group({}, reduce="exact", optimizer={"optimizer": "sgd", "sgd_momentum": 0.9}),
}
CASES = {**SHARED, **ALONE}


def worker(rank: int, store: Any, _: Any) -> dict[str, Any]:
    """What is wrong with the shards of each case on this rank."""
    from torch.distributed import PrefixStore

    found = {name: Shards(one, rank, PrefixStore(name, store)).wrong for name, one in SHARED.items()}
    for name, one in ALONE.items():
        found[name] = Shards(one, 0, PrefixStore(f"{name} {rank}", store)).wrong
    return found


class Shards:
    """The shards of one rank after a step."""

    def __init__(self, one: dict[str, Any], position: int, store: Any) -> None:
        from torch.distributed import PrefixStore

        from spare_megatron.megatron_adapter.model import world
        from tests.megatron import groups

        self.wrong: list[str] = []
        self.engine = groups.engine_of(one, position, PrefixStore("group", store))
        try:
            peers = groups.peers_of(PrefixStore(f"peers{position}", store), 0, 1)
            for step in (1, 2):
                groups.one_step(self.engine, peers, one, 0, step)
            self.check_flips(random.Random(SEED + position))
            self.check_elements()
        finally:
            world.destroy()

    def check_flips(self, draw: random.Random) -> None:
        """Flip bits of the optimizers' tensors, wherever they are."""
        import torch

        shards = self.engine.shards

        def digests() -> tuple[list[int], str, dict[str, int]]:
            engine = self.engine
            return shards.digests(range(SHARDS)), engine.weights_digest(), dict(engine.weights_checksums())

        before, due = digests(), self.engine.applied % SHARDS
        model = {one.untyped_storage().data_ptr() for chunk in self.engine.replica.chunks for one in chunk.parameters()}
        kept = [
            (kind, tensor)
            for part in self.engine.replica.optimizer.chained_optimizers
            for main, state in part.optimizer.state.items()
            for kind, tensor in [*state.items(), ("main", main)]
            if kind != "step" and tensor.untyped_storage().data_ptr() not in model
        ]
        for _ in range(FLIPS):
            kind, tensor = draw.choice(kept)
            bits = tensor.detach().view(-1).view(torch.int32)
            at, bit = draw.randrange(len(bits)), 1 << draw.randrange(31)
            bits[at] ^= bit
            after = digests()
            bits[at] ^= bit
            changed = [n for n in range(SHARDS) if before[0][n] != after[0][n]]
            named = [name for name in before[2] if before[2][name] != after[2][name]]
            if len(changed) != 1 or named != [f"{kind} of state shard {changed[0]}"]:
                self.wrong.append(f"element {at} of {kind}, bit {bit}: {changed} changed, {named} is named")
            if (before[1] != after[1]) != (changed == [due]) or first_part(before[1]) != first_part(after[1]):
                self.wrong.append(f"element {at} of {kind} in shard {changed}: the vote compares shard {due}")
        if digests() != before:
            self.wrong.append("digests change by themselves")

    def check_elements(self) -> None:
        """Write into each element where it lies in the buffers, and look for it in the shards."""
        import torch

        expected = []
        for part, main, places, place in self.elements():
            values = torch.arange(place, place + places.stop - places.start, dtype=torch.float32)
            expected += values.tolist()
            for kind, tensor in part.optimizer.state[main].items():
                if kind != "step":
                    tensor.view(-1)[places] = values
        found: dict[str, list[list[float]]] = {}
        for shard in range(SHARDS):
            for one in self.engine.shards.tensors([shard]):
                if one.kind != "main":
                    lists = found.setdefault(one.kind, [[] for _ in range(SHARDS)])
                    lists[shard] += one.tensor.tolist()
        for kind, lists in found.items():
            inside = list(itertools.chain.from_iterable(lists))
            if sorted(inside) != sorted(expected):
                self.wrong.append(f"{kind}: {len(inside)} elements in shards, not each of {len(expected)} once")
            for buffer in {value // FIELD for value in expected}:
                owned = [(v, shard) for shard in range(SHARDS) for v in lists[shard] if v // FIELD == buffer]
                if [shard for _, shard in sorted(owned)] != sorted(shard for _, shard in owned):
                    self.wrong.append(f"{kind}: the shards are no ranges of buffer {buffer}")
            if not all(lists):
                self.wrong.append(f"{kind}: an empty shard")

    def elements(self) -> Iterator[tuple[Any, Any, slice, int]]:
        """(optimizer, what it updates, a range of that, where this begins in the buffers), as megatron-core has it."""
        from spare_megatron.megatron_adapter.checkpoint.optimizer_gather import main_copies

        replica = self.engine.replica
        for number, part in enumerate(replica.optimizer.chained_optimizers):
            if hasattr(part, "gbuf_ranges"):
                for index, (ranges, buffer) in enumerate(zip(part.gbuf_ranges, part.buffers, strict=True)):
                    start = FIELD * (4 * number + index)
                    ((_, buckets),) = ranges.items()
                    for bucket, of_bucket in zip(buffer.buckets, buckets, strict=True):
                        for parameter, mine in of_bucket["param_map"].items():
                            group, order = part.model_param_group_index_map[parameter]
                            main = part.optimizer.param_groups[group]["params"][order]
                            yield part, main, slice(0, main.numel()), start + mine["gbuf_local"].start
                        start += bucket.grad_data.numel() // part.data_parallel_group.size()
                continue
            mains = main_copies(part)
            for index, chunk in enumerate(replica.chunks):
                for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                    for parameter, (start, _, _) in buffer.param_index_map.items():
                        if parameter in mains:
                            main = mains[parameter]
                            yield part, main, slice(0, main.numel()), FIELD * (4 * number + index) + start


@pytest.fixture(scope="module")
def results() -> list[Any]:
    print(f"seed {SEED}")
    return run_ranks("tests.megatron.test_optimizer_shards:worker", [None] * 2, timeout_s=240.0)


@pytest.mark.parametrize("name", CASES)
def test_each_element_is_in_one_shard_and_a_flip_names_it(results: list[Any], name: str) -> None:
    for result in results:
        assert result[name] == []
