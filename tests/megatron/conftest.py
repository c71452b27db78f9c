"""Failure-free jobs that the tests of several files compare with, and models that they convert."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def dense(once: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> str:
    """Digest of what one group of PP2 leaves, which no number of groups and no failure may change."""
    from tests.megatron.test_exact import DENSE, train

    found: str = once("dense", lambda: train(tmp_path_factory.mktemp("dense"), 1, DENSE)[1])
    return found


@pytest.fixture(scope="session")
def undisturbed(once: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directory of a job whose groups keep a part of the optimizer's state."""
    from tests.megatron.test_state_redundancy import without_failures

    return Path(once("undisturbed", lambda: without_failures(tmp_path_factory.mktemp("undisturbed"))))


@pytest.fixture(scope="session")
def whole_saves(once: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Name -> digest of the checkpoints of that job in the middle and at its end, if its only group keeps all of it."""
    from tests.megatron.test_divided_saves import saved, start

    def make() -> dict[str, str]:
        folder = tmp_path_factory.mktemp("whole")
        start(folder, "--save-interval", "4", groups=1).finish(timeout_s=200)
        return saved(folder)

    found: dict[str, str] = once("whole saves", make)
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Function from a kind to a directory with its model, which is made once."""
    from tests.megatron.hugging_face_models import make

    top = tmp_path_factory.mktemp("models")

    def of(kind: str) -> Path:
        if not (top / kind).is_dir():
            make(kind, top / kind, num_hidden_layers=2) if kind != "gpt2" else make(kind, top / kind, n_layer=2)
        return top / kind

    return of


@pytest.fixture
def model(models: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """The same, in a copy of the test's own."""
    return lambda kind: Path(shutil.copytree(models(kind), tmp_path / "hf"))
