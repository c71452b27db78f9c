"""For all tests: no test of a property has a time limit for one example, because machines may be slow or busy, and each
run tries the same examples unless --hypothesis-profile random is given; no job of a test that fails goes on beside the
next one. What the tests of several processes need is made once."""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("same", deadline=None, derandomize=True)
settings.register_profile("random", deadline=None, print_blob=True)
settings.load_profile("same")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests on the cluster of Slurm mostly wait, one after the other: they come first, or they would be all that is
    left at the end."""
    items.sort(key=lambda item: "slurm" not in item.path.parts)


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
