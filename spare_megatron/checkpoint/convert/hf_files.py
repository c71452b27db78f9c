"""Finds the stored tensors of a Hugging Face directory: which files count, and what is in them.

The index file decides; without one it is ``model.safetensors`` (or ``pytorch_model.bin``). A directory may hold more:
older parts, an averaged copy, another format's files. These never count, and a tensor's name may occur in one file
only.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Protocol

import torch

from spare_megatron.checkpoint.convert import safetensors_file
from spare_megatron.checkpoint.convert.hf_values import read_json, shown
from spare_megatron.checkpoint.convert.pages import release
from spare_megatron.config.errors import ConfigError
from spare_megatron.megatron_adapter.checkpoint.restricted_pickle import ForbiddenPickleError
from spare_megatron.megatron_adapter.checkpoint.safe_loading import load_weights

FORMATS = (("model.safetensors", "*.safetensors"), ("pytorch_model.bin", "pytorch_model*.bin"))
"""(the name of a model in one file, the names of all files of this format), the preferred format first."""


class StoredTensor(Protocol):
    """A tensor in a file."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, index: int | None = None) -> torch.Tensor:
        """Its values, or those at an index of its first axis, in memory of their own."""


@dataclasses.dataclass(frozen=True)
class LoadedTensor:
    """A tensor of a ``.bin`` file, memory-mapped."""

    tensor: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def read(self, index: int | None = None) -> torch.Tensor:
        stored = self.tensor if index is None else self.tensor[index]
        values = stored.contiguous().clone()
        if stored.is_contiguous():
            release(stored)
        return values


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Name -> tensor of the model in a directory, without values; ConfigError where its files are damaged or where it
    is not clear which count."""
    found: dict[str, StoredTensor] = {}
    origin: dict[str, Path] = {}
    paths, index = _files(folder)
    for path in paths:
        for name, tensor in _tensors_of(path).items():
            if name in found:
                raise ConfigError(
                    f"{origin[name]} and {path} both have {name}; leave only the files that belong to the model"
                )
            found[name], origin[name] = tensor, path
    for name, file in index.items():
        if name not in found or origin[name].name != file:
            raise ConfigError(f"{folder}'s index says that {file} has {name}, but it has not; fetch the model again")
    return found


def _files(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """The files that count, and the index (tensor -> file), which is empty for a model in one file."""
    for single, pattern in FORMATS:
        index = folder / f"{single}.index.json"
        if index.is_file():
            return _indexed(folder, single, index)
        if (folder / single).is_file():
            return [folder / single], {}
        others = sorted(path.name for path in folder.glob(pattern))
        if others:
            raise ConfigError(
                f"{folder} has {_some(others)}, but neither {single} nor {index.name}, which say what the model is; "
                "fetch the index, or give the one file of a model that name"
            )
    raise ConfigError(f"{folder} has neither *.safetensors nor pytorch_model*.bin; give a model's directory")


def _indexed(folder: Path, single: str, index: Path) -> tuple[list[Path], dict[str, str]]:
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ConfigError(f"{index} has no weight_map of tensors and files; fetch the model again")
    for name, file in places.items():
        if not isinstance(file, str) or Path(file).name != file or file.startswith("."):
            raise ConfigError(f"{index} places {name} in {shown(file)}, which is not a file's name; fetch it again")
    names = sorted(set(places.values()))
    if (folder / single).is_file() and single not in names:
        raise ConfigError(
            f"{folder} has {single} and {index.name}, which names {_some(names)} instead, so there are two models; "
            "move one of them away"
        )
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ConfigError(f"{folder} has no {_some(missing)}, which {index.name} names; fetch the model again")
    return [folder / name for name in names], places


def _tensors_of(path: Path) -> dict[str, Any]:
    try:
        if path.suffix == ".safetensors":
            return dict(safetensors_file.tensors_of(path))
        state = load_weights(path, mmap=True)
    except ForbiddenPickleError as error:
        raise ConfigError(f"{error}; do not use this model") from None
    except ValueError as error:
        raise ConfigError(str(error)) from None
    except Exception as error:  # torch raises many kinds for damaged files
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ConfigError(f"{path} cannot be read ({reason}); fetch it again") from error
    if not isinstance(state, dict) or not all(isinstance(one, torch.Tensor) for one in state.values()):
        raise ConfigError(f"{path} holds other things than named tensors; fetch the model's own file")
    return {name: LoadedTensor(tensor) for name, tensor in state.items()}


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
