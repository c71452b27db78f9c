"""Reads and writes model directories in Hugging Face's format, without transformers.

It reads ``config.json`` and ``*.safetensors`` or ``pytorch_model*.bin``. It writes safetensors as transformers does: in
files of at most 5 GB, with an index where there are several.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from spare_megatron.checkpoint.convert import hf_config, hf_tensors, safetensors_file
from spare_megatron.checkpoint.convert.layout import with_vocabulary
from spare_megatron.checkpoint.convert.model import Entry, ModelShape, TensorSource, entries
from spare_megatron.checkpoint.convert.pages import release
from spare_megatron.config.errors import ConfigError
from spare_megatron.megatron_adapter.checkpoint.restricted_pickle import ForbiddenPickleError
from spare_megatron.megatron_adapter.checkpoint.safe_loading import load_weights

PART_BYTES_MAX = 5_000_000_000


class HuggingFaceSource:
    """A source that reads a Hugging Face model."""

    iteration = 1
    """The iteration that Megatron's tools give a model without one; they cannot resume from 0 or 'release'."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            config = json.loads((folder / "config.json").read_text())
            self.shape = hf_config.shape_of_config(config)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{folder}/config.json cannot be read ({error}); give a model's directory") from None
        except KeyError as error:
            raise ConfigError(f"{folder}/config.json has no {error}, which a conversion needs") from None
        self.args: Mapping[str, Any] = {}
        self._kind = str(config["model_type"])
        self._stored = _stored(folder)

    def read(self, entry: Entry) -> torch.Tensor:
        rule, names = hf_tensors.rule_of(entry, self._kind)
        return rule.join([self._find(name).read() for name in names], self.shape)

    def dtype(self, entry: Entry) -> torch.dtype:
        return self._find(hf_tensors.rule_of(entry, self._kind)[1][0]).dtype

    def _find(self, name: str) -> Any:
        # the first conversions of OpenAI's GPT-2 have names without 'transformer.'
        for known in (name, name.removeprefix("transformer.")):
            if known in self._stored:
                return self._stored[known]
        raise ConfigError(f"{self.folder} has no tensor {name}, which its config.json promises; fetch the model again")


@dataclasses.dataclass(frozen=True)
class _Loaded:
    """A tensor of a ``.bin`` file, memory-mapped."""

    tensor: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def read(self) -> torch.Tensor:
        """Its values, in memory of their own."""
        values = self.tensor.contiguous().clone()
        if self.tensor.is_contiguous():
            release(self.tensor)
        return values


def _stored(folder: Path) -> dict[str, Any]:
    """Name of each stored tensor -> an object with ``dtype`` and ``read()``."""
    found: dict[str, Any] = {}
    try:
        for path in sorted(folder.glob("*.safetensors")):
            found |= safetensors_file.tensors_of(path)
        for path in [] if found else sorted(folder.glob("pytorch_model*.bin")):
            state = load_weights(path, mmap=True)
            found |= {name: _Loaded(tensor) for name, tensor in state.items()}
    except ForbiddenPickleError as error:
        raise ConfigError(f"{error}; do not use this model") from None
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{folder} cannot be read: {' '.join(str(error).split())[:200]}") from error
    if not found:
        raise ConfigError(f"{folder} has neither *.safetensors nor pytorch_model*.bin; give a model's directory")
    return found


def write(source: TensorSource, folder: Path, kind: str | None, say: Callable[[Entry], None], part_bytes: int) -> None:
    """Write a Hugging Face model from a source, in files of at most ``part_bytes`` bytes.

    ``config.json`` is the one in ``source.folder`` where that describes this model, else it is made from its shape.
    ``kind`` None takes the kind that fits the shape. ``say`` is called after each tensor of the source.
    """
    shape = source.shape
    rows = shape.vocab_size or shape.padded_vocab_size
    kind = kind or hf_config.kind_of(shape)
    dtype = source.dtype(entries(shape)[0])
    folder.mkdir(parents=True, exist_ok=True)
    config = _travelled_config(source.folder, shape) or hf_config.config_of_shape(shape, kind, dtype)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    parts = _parts(source, kind, rows, part_bytes)
    index: dict[str, str] = {}
    total = 0
    for number, part in enumerate(parts, 1):
        name = "model.safetensors" if len(parts) == 1 else f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        reader = _Parts(source, kind, rows, say)
        sizes = {one: (dtype, size) for one, (_, dtype, size) in part.items()}
        total += safetensors_file.write(folder / name, sizes, lambda one, r=reader, p=part: r.value(one, p[one][0]))
        index |= dict.fromkeys(part, name)
    if len(parts) > 1:
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2)
        (folder / "model.safetensors.index.json").write_text(text + "\n")


def _parts(
    source: TensorSource, kind: str, rows: int, part_bytes: int
) -> list[dict[str, tuple[Entry, torch.dtype, Any]]]:
    """For each file to write: name -> (entry of the source, dtype, shape) of its tensors."""
    parts: list[dict[str, tuple[Entry, torch.dtype, Any]]] = [{}]
    size = 0
    for entry in entries(source.shape):
        rule, names = hf_tensors.rule_of(entry, kind)
        dtype = source.dtype(entry)
        wide = (rows, *entry.shape[1:]) if entry.vocabulary else entry.shape
        made = rule.split(torch.empty(wide, dtype=dtype, device="meta"), source.shape)
        here = sum(one.numel() * dtype.itemsize for one in made)
        if size and size + here > part_bytes:
            parts.append({})
            size = 0
        parts[-1] |= {name: (entry, dtype, tuple(one.shape)) for name, one in zip(names, made, strict=True)}
        size += here
    return parts


class _Parts:
    """Gives the values of Hugging Face's tensors. It keeps what came of the last tensor of the source, because several
    of Hugging Face's may come from one."""

    def __init__(self, source: TensorSource, kind: str, rows: int, say: Callable[[Entry], None]) -> None:
        self._source, self._kind, self._rows, self._say = source, kind, rows, say
        self._entry: Entry | None = None
        self._made: dict[str, torch.Tensor] = {}

    def value(self, name: str, entry: Entry) -> torch.Tensor:
        if entry != self._entry:
            self._made = {}  # frees the old tensor before the new one is read
            tensor = self._source.read(entry)
            tensor = with_vocabulary(tensor, self._rows) if entry.vocabulary else tensor
            rule, names = hf_tensors.rule_of(entry, self._kind)
            self._made = dict(zip(names, rule.split(tensor, self._source.shape), strict=True))
            self._entry = entry
            self._say(entry)
        return self._made[name]


def _travelled_config(folder: Path, shape: ModelShape) -> dict[str, Any] | None:
    """The config.json in ``folder``, where it describes a model of this shape; else None."""
    path = folder / "config.json"
    if not path.is_file():
        return None
    try:
        config: dict[str, Any] = json.loads(path.read_text())
        return config if hf_config.same_model(hf_config.shape_of_config(config), shape) else None
    except (ValueError, KeyError, ConfigError):
        return None
