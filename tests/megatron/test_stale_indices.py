"""Data made anew under the prefix of earlier ones: the cached sample indices are built again, and every sample is that
of a run without a cache."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from tests.spawn import run_ranks

SEQ = 16
COUNTS = {"first": 40, "fewer": 20, "more": 90}
"""Documents of 30 tokens and an end; all make the same number of samples of a job, by other documents."""


def make(folder: Path, name: str, count: int) -> None:
    from spare_megatron.data.preprocess import command

    path = folder / f"{name}.jsonl"
    lines = [json.dumps({"text": " ".join(str((7 * d + t + count) % 500) for t in range(30))}) for d in range(count)]
    path.write_text("\n".join(lines))
    words = ["--input", str(path), "--output-prefix", str(folder / name), "--append-eod"]
    assert command.main([*words, "--tokenizer-type", "NullTokenizer", "--vocab-size", "500"]) == 0


def samples(folder: Path, cache: str | None) -> list[list[int]]:
    """The training samples of a job on the blend of a and b, as its leader builds them."""
    import pretrain_gpt
    from spare_megatron.data.data_files import check_data
    from spare_megatron.data.dataset_build import build_datasets, sample_counts
    from tests.megatron.test_data import flags, start_job

    words = flags(str(folder), 1)
    at = words.index("--data-cache-path")
    words[at : at + 2] = [] if cache is None else ["--data-cache-path", cache]
    job, args = start_job(words, 2, 0, 0)
    provider: Any = pretrain_gpt.train_valid_test_datasets_provider
    built = build_datasets(provider, sample_counts(job.train_iters, args), args, check_data(args, 501), leads=True)
    return [built.train[number]["tokens"].tolist() for number in range(len(built.train))]


def worker(rank: int, store: Any, directory: str) -> dict[str, Any]:
    from spare_megatron.config.shape import JobShape
    from spare_megatron.megatron_adapter.model import world as group_world

    group_world.init_group_world(JobShape(num_groups=1, micro_batch_size=1, global_batch_size=1), 0, store)
    reported: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: reported.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("spare_megatron.data.stale_indices").addHandler(handler)
    result: dict[str, Any] = {}
    for place in ("given", "beside"):
        folder = Path(directory) / place
        folder.mkdir()
        cache = f"{folder}/cache" if place == "given" else None
        make(folder, "b", 25)
        for turn, name in enumerate(("first", "fewer", "more", "first", "first")):
            if turn < 4:
                make(folder, "a", COUNTS[name])
            reported.clear()
            result[f"{place} {turn}"] = [samples(folder, cache), samples(folder, f"{folder}/fresh{turn}"), [*reported]]
    # indices of a program that writes no record: they count as old if they are older than the data
    folder = Path(directory) / "given"
    (folder / "cache" / "spare-layouts.json").unlink()
    for path in folder.glob("cache/*description.txt"):
        os.utime(path, (1, 1))
    make(folder, "a", COUNTS["fewer"])
    reported.clear()
    result["no record"] = [samples(folder, f"{folder}/cache"), samples(folder, f"{folder}/last"), [*reported]]
    return result


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    result: dict[str, Any] = run_ranks("tests.megatron.test_stale_indices:worker", [str(tmp_path_factory.mktemp("d"))])[
        0
    ]
    return result


def test_data_made_anew_get_indices_of_their_own(built: dict[str, Any]) -> None:
    for name, (cached, fresh, _) in built.items():
        assert cached == fresh, name
    assert len({json.dumps(built[f"given {turn}"][0]) for turn in range(5)}) == 3, "the data did differ"


def test_it_is_said_once_and_only_where_something_changed(built: dict[str, Any]) -> None:
    for place in ("given", "beside"):
        assert [len(built[f"{place} {turn}"][2]) for turn in range(5)] == [0, 1, 1, 1, 0]
        assert "a_text_document was made anew: its sample indices in " in built[f"{place} 1"][2][0]
    assert any("a_text_document was made anew" in text for text in built["no record"][2])
