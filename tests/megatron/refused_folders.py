"""Hugging Face directories that tests spoil, and their refusal: one sentence, exit code 2, nothing left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from spare_megatron.cli import convert
from tests.megatron.hugging_face_models import run

safetensors_torch = pytest.importorskip("safetensors.torch")

FILE = "model.safetensors"
Capture = pytest.CaptureFixture[str]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(safetensors_torch.load_file(folder / FILE))


def store(folder: Path, tensors: dict[str, torch.Tensor], name: str = FILE) -> None:
    safetensors_torch.save_file(
        {key: one.contiguous() for key, one in tensors.items()}, folder / name, {"format": "pt"}
    )


def configured(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def refused(folder: Path, capsys: Capture, *words: str) -> str:
    """The sentence with which a conversion is refused, at once and without a trace."""
    save = folder.parent / "refused"
    command = ["--model-type", "GPT", "--loader", "hf", "--saver", "core", "--load-dir", str(folder)]
    capsys.readouterr()
    assert convert.main([*command, "--save-dir", str(save)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    assert not save.exists()
    for word in words:
        assert word in error, error
    return error


def returned(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors after a conversion to core and back."""
    top = folder.parent
    run(folder, top / "core", "hf", "core")
    run(top / "core", top / "back", "core", "hf")
    return weights(top / "back")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def parts(folder: Path) -> dict[str, torch.Tensor]:
    """Store a model in two files with an index; returns its tensors."""
    tensors = weights(folder)
    (folder / FILE).unlink()
    index = {}
    for number in (1, 2):
        name = f"model-0000{number}-of-00002.safetensors"
        here = {key: one for place, (key, one) in enumerate(sorted(tensors.items())) if place % 2 == number - 1}
        store(folder, here, name)
        index |= dict.fromkeys(here, name)
    (folder / f"{FILE}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return tensors
