"""Data sets on real ranks: groups that build at the same moment read the same samples as plain megatron-core does.

Four processes play several jobs one after the other: two groups of PP2 on a cold cache and again on a warm one, four
groups that race without any lock, and two groups of TP2 whose second rank gets its microbatch from the first.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from spare_megatron.config.shape import JobShape
from tests.pure.megatron_sampler import in_order
from tests.spawn import run_ranks

SEQ, MICRO, BATCH, STEPS, GROUPS = 16, 2, 16, 5, 2
PER_EPOCH = 40 * 30 // SEQ


def flags(directory: str, seed: int, *extra: str) -> list[str]:
    words = (
        f"--data-path 0.3 {directory}/a_text_document 0.7 {directory}/b_text_document --split 8,1,1 "
        f"--data-cache-path {directory}/cache --tokenizer-type NullTokenizer --vocab-size 500 --num-layers 2 "
        f"--hidden-size 8 --num-attention-heads 2 --seq-length {SEQ} --max-position-embeddings {SEQ} --lr 1 "
        f"--micro-batch-size {MICRO} --global-batch-size {BATCH} --train-iters {STEPS} --eval-iters 1 --seed {seed}"
    )
    return [*words.split(), *extra]


def start_job(words: list[str], groups: int, group: int, position: int) -> tuple[Any, Any]:
    """The flags of one rank, known to users' code as pretrain makes them known."""
    from spare_megatron.worker import user_state
    from spare_megatron.worker.job_arguments import parse_job
    from spare_megatron.worker.tokenizer import build_tokenizer

    place = {"SPARE_NUM_GROUPS": groups, "SPARE_GROUP": group, "SPARE_POSITION": position}
    job, args = parse_job(words, {name: str(value) for name, value in place.items()})
    user_state.start(user_state.UserState(args, build_tokenizer(args)))
    return job, args


def together(store: Any, name: str, processes: int) -> None:
    """Go on when all processes are here."""
    if store.add(name, 1) == processes:
        store.set(f"{name}/go", "1")
    store.wait([f"{name}/go"])


def play(rank: int, store: Any, name: str, words: list[str], ranks: int, lock: bool = True) -> dict[str, Any]:
    """One rank of a job of four processes in groups of ``ranks``: build, then read what its group hosts."""
    from torch.distributed import PrefixStore

    import pretrain_gpt
    from spare_megatron.data import dataset_build
    from spare_megatron.data.data_files import check_data
    from spare_megatron.megatron_adapter.model import world as group_world
    from spare_megatron.worker.user_state import get_tokenizer

    group, position = divmod(rank, ranks)
    job, args = start_job(words, 4 // ranks, group, position)
    world = group_world.init_group_world(job.shape, position, PrefixStore(f"{name}/{group}", store))
    files = check_data(args, get_tokenizer().vocab_size)
    if not lock:
        dataset_build.built_by_one = lambda *_: contextlib.nullcontext()  # type: ignore[assignment]
    written = count_writes()
    together(store, f"{name}/start", 4)
    built = dataset_build.build_datasets(
        pretrain_gpt.train_valid_test_datasets_provider,
        dataset_build.sample_counts(job.train_iters, args),
        args,
        files,
        leads=position == 0,
        tensor_rank=world.tensor_rank,
    )
    result = read(job, args, built, group, world)
    group_world.destroy()
    return {**result, "written": len(written)}


def count_writes() -> list[str]:
    """A list that grows with each index file that this process writes."""
    from spare_megatron.megatron_adapter.data import datasets

    written: list[str] = []
    save = getattr(datasets.save_whole, "counted", datasets.save_whole)

    def counting(path: str, array: Any, **options: Any) -> None:
        written.append(path)
        save(path, array, **options)

    counting.counted = save  # type: ignore[attr-defined]
    datasets.save_whole = counting
    return written


def read(job: Any, args: Any, built: Any, group: int, world: Any) -> dict[str, Any]:
    """Every step's microbatches of the group's shard, through the loader and the user's get_batch."""
    import pretrain_gpt
    from spare_megatron.data.microbatch_loader import MicrobatchLoader, train_consumed
    from spare_megatron.data.sampling import SampleOrder

    shape: JobShape = job.shape
    order = SampleOrder(shape, 0 if built.train is None else len(built.train))
    loader = MicrobatchLoader(
        built.train,
        order,
        inner=world.data_rank,
        hosted=frozenset({group}),
        consumed=train_consumed(0, BATCH),
        vocab_size=501,
    )
    numbers = [group * shape.microbatches_per_shard + j for j in range(shape.microbatches_per_shard)]
    rows = []
    for step in range(1, STEPS + 1):
        source = loader(step, numbers)
        for _ in numbers:
            batch = pretrain_gpt.get_batch(source)
            rows.append([None if value is None else value.long().flatten(1).sum(1).tolist() for value in batch])
    loader.close()
    sizes = [None if part is None else len(part) for part in (built.train, built.valid, built.test)]
    return {"rows": rows, "sizes": sizes}


def plain(directory: str, seed: int, groups: int) -> dict[str, Any]:
    """The same, by megatron-core alone in one process: its builder, its data set, its sampler's order."""
    import torch.distributed as dist

    import pretrain_gpt
    from spare_megatron.data.dataset_build import sample_counts

    words = flags(f"{directory}", seed)
    words[words.index("--data-cache-path") + 1] = f"{directory}/plain"
    job, args = start_job(words, groups, 0, 0)
    from spare_megatron.megatron_adapter.model import world as group_world

    group_world.init_group_world(JobShape(num_groups=1, micro_batch_size=1, global_batch_size=1), 0, dist.HashStore())
    train, valid, test = pretrain_gpt.train_valid_test_datasets_provider(list(sample_counts(job.train_iters, args)))
    ranks = {}
    for rank in range(groups):
        numbers = in_order(len(train), 0, MICRO, rank, groups)[: STEPS * BATCH // MICRO // groups]
        ranks[rank] = [
            [[int(train[number][key].long().sum()) for number in row] for key in ("tokens", "labels")]
            for row in numbers
        ]
    group_world.destroy()
    return {"ranks": ranks, "sizes": [len(train), len(valid), len(test)]}


def worker(rank: int, store: Any, directory: str) -> dict[str, Any]:
    result: dict[str, Any] = {}
    pipeline = ["--pipeline-model-parallel-size", "2"]
    tensor = ["--tensor-model-parallel-size", "2"]
    for name in ("cold", "warm"):
        result[name] = play(rank, store, name, flags(directory, 1, *pipeline), 2)
    result["tensor"] = play(rank, store, "tensor", flags(directory, 1, *tensor), 2)
    for seed in (2, 3, 4):
        result[f"race{seed}"] = play(rank, store, f"race{seed}", flags(directory, seed), 1, lock=False)
    if rank == 0:
        result["plain"] = [
            plain(directory, 1, 2),
            plain(directory, 2, 4),
            plain(directory, 3, 4),
            plain(directory, 4, 4),
        ]
    together(store, "end", 4)
    return result


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    from spare_megatron.data.preprocess import command

    directory = tmp_path_factory.mktemp("data")
    for name, count in (("a", 40), ("b", 25)):
        lines = [json.dumps({"text": " ".join(str((7 * d + t) % 500) for t in range(30))}) for d in range(count)]
        (directory / f"{name}.jsonl").write_text("\n".join(lines))
        words = ["--input", f"{directory}/{name}.jsonl", "--output-prefix", f"{directory}/{name}", "--append-eod"]
        assert command.main([*words, "--tokenizer-type", "NullTokenizer", "--vocab-size", "500"]) == 0
    return run_ranks("tests.megatron.test_data:worker", [str(directory)] * 4), directory


@pytest.mark.parametrize("name", ["cold", "warm"])
def test_groups_of_two_stages_read_what_plain_megatron_reads(played: Any, name: str) -> None:
    results, _ = played
    wanted = results[0]["plain"][0]
    for rank, result in enumerate(results):
        group, stage = divmod(rank, 2)
        assert result[name]["sizes"] == wanted["sizes"]
        for row, (tokens, labels) in zip(result[name]["rows"], wanted["ranks"][str(group)], strict=True):
            assert row[0] == (tokens if stage == 0 else None)
            assert row[1] == (labels if stage == 1 else None)


def test_the_second_tensor_rank_gets_the_firsts_microbatch(played: Any) -> None:
    results, _ = played
    for first, second in ((0, 1), (2, 3)):
        assert results[second]["tensor"]["sizes"] == [None, None, None]
        assert results[first]["tensor"]["rows"] == results[second]["tensor"]["rows"]
        tokens = [row[0] for row in results[first]["tensor"]["rows"]]
        assert tokens == [row[0] for row in results[0]["plain"][0]["ranks"][str(first // 2)]]


@pytest.mark.parametrize("case", [1, 2, 3])
def test_groups_that_race_without_a_lock_read_whole_files(played: Any, case: int) -> None:
    results, directory = played
    wanted = results[0]["plain"][case]
    for group, result in enumerate(results):
        race = result[f"race{case + 1}"]
        assert race["sizes"] == wanted["sizes"]
        assert [row[:2] for row in race["rows"]] == wanted["ranks"][str(group)]
    assert not list((directory / "cache").glob(".*.part"))


def test_indices_are_built_once(played: Any) -> None:
    results, directory = played
    files = 2 * 3 * 3 + 3 * 2  # three for each file and split, two for each blend
    assert sorted(result["cold"]["written"] for result in results) == [0, 0, 0, files]
    assert [result["warm"]["written"] for result in results] == [0, 0, 0, 0]
    races = sum(result[f"race{seed}"]["written"] for result in results for seed in (2, 3, 4))
    assert races > 3 * files, "there was no race"
    assert len(list((directory / "cache").glob("spare-indices-*"))) == 1
