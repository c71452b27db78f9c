"""For all tests: no test of a property has a time limit for one example, because machines may be slow or busy, and each
run tries the same examples unless --hypothesis-profile random is given; no job of a test that fails goes on beside the
next one. What the tests of several processes need is made once. The modules and the tests themselves, a million
objects, are never looked through for garbage, which takes half a second of each process each time."""

from __future__ import annotations

import fcntl
import gc
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import settings

from tests import preloaded

settings.register_profile("same", deadline=None, derandomize=True)
settings.register_profile("random", deadline=None, print_blob=True)
settings.load_profile("same")
gc.disable()  # until all is imported and collected


LONGEST = (
    "slurm/test_slurm",
    "slurm/test_places",
    "megatron/test_state_redundancy",
    "megatron/test_divided_returns",
    "megatron/test_smaller_shapes",
    "megatron/test_divided_saves",
    "megatron/test_exact",
    "process/test_control_plane",
    "explore/test_explore",
    "process/test_disk",
    "process/test_launch",
    "process/test_preloaded",
    "kernels/test_against_reference",
    "process/test_relief",
    "kernels/test_emulated",
    "process/test_masking",
    "process/test_checkpoints",
    "process/test_overlap",
    "process/test_stop_signals",
    "process/test_page_strangers",
    "process/test_return",
    "process/test_group_restarts",
    "megatron/test_fine_tune_round_trip",
    "process/test_soak",
    "megatron/test_parity",
    "megatron/test_checkpointing",
    "megatron/test_engine",
    "megatron/test_program_runner",
    "megatron/test_pieces",
    "megatron/test_kinds_of_models",
    "megatron/test_return",
    "megatron/test_overlap",
    "megatron/test_optimizers",
    "process/test_job_attempts",
    "process/test_torchrun",
    "process/test_adoption",
    "megatron/test_convert",
    "explore/test_walks",
    "megatron/test_standbys",
    "megatron/test_layouts",
    "megatron/test_masking",
    "fuzz/test_model_fuzzers",
    "megatron/test_transferred_state",
    "process/test_leadership_lease",
    "process/test_suspicion",
    "process/test_ring_links",
    "process/test_standbys",
    "explore/test_shard_mutations",
    "megatron/test_preprocess_golden",
    "process/test_leader",
    "megatron/test_word_memory",
)
"""The files whose tests last longest, the longest first (``--durations=0`` has their times). scripts/test.sh gives each
file to one worker: a long one that came late would be all that is left at the end."""


def pytest_configure(config: pytest.Config) -> None:
    """Workers share one preloaded parent, which imports what it needs while they collect their tests."""
    if config.getoption("numprocesses", None) and "PYTEST_XDIST_WORKER" not in os.environ:
        gc.enable()  # this process collects no tests
        preloaded.share()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files come first, then those of tests that start processes, then the others."""
    place = {name: number for number, name in enumerate(LONGEST)}

    def when(item: pytest.Item) -> tuple[int, bool]:
        folder, file = item.path.parts[-2:]
        return place.get(f"{folder}/{file.removesuffix('.py')}", len(LONGEST)), folder == "pure"

    items.sort(key=when)


def pytest_collection_finish() -> None:
    """From here on garbage is collected, of what the tests make."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _jobs_end_with_their_test() -> Iterator[None]:
    harness = sys.modules.get("tests.process.harness")
    before = len(harness.STARTED) if harness is not None else 0
    yield
    harness = sys.modules.get("tests.process.harness")
    if harness is not None:
        harness.end_since(before)


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[], Any]], Any]:
    """``once(name, make)``: what ``make`` returned, as JSON holds it, in whichever process of this run of the tests
    needed it first. The others wait for it; where it fails, the next one tries it for itself."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "made once"
    folder.mkdir(exist_ok=True)

    def made(name: str, make: Callable[[], Any]) -> Any:
        path = folder / f"{name}.json"
        with (folder / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                path.write_text(json.dumps(make()))
        return json.loads(path.read_text())

    return made
