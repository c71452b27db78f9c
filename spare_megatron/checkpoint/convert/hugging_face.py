"""Reads and writes model directories in Hugging Face's format, without transformers.

It reads ``config.json`` and the files that :mod:`.hf_files` finds. It writes safetensors as transformers does: in
files of at most 5 GB, with an index where there are several.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from spare_megatron.checkpoint.convert import hf_config, hf_tensors, safetensors_file, tokenizer_files
from spare_megatron.checkpoint.convert.hf_files import StoredTensor, stored_tensors
from spare_megatron.checkpoint.convert.hf_values import read_json
from spare_megatron.checkpoint.convert.layout import with_vocabulary
from spare_megatron.checkpoint.convert.model import NO_ITERATION, Entry, TensorSource
from spare_megatron.checkpoint.convert.returned_config import returned_config
from spare_megatron.checkpoint.convert.stored_names import check_hugging_face, stored_name
from spare_megatron.checkpoint.convert.tensors import entries
from spare_megatron.checkpoint.convert.tokenizer_files import NAMES
from spare_megatron.checkpoint.files import sync_files
from spare_megatron.config.errors import ConfigError
from spare_megatron.runtime.run_directory import sync_path

PART_BYTES_MAX = 5_000_000_000
PARTIAL = ".spare-convert"
"""The folder in which files are until all are written."""
LAST = ("model.safetensors", "model.safetensors.index.json")
"""Without one of these no program takes a directory for a model."""


class HuggingFaceSource:
    """A source that reads a Hugging Face model."""

    iteration = NO_ITERATION

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        config = read_json(folder / "config.json")
        try:
            self.shape = hf_config.shape_of_config(config)
        except ConfigError as error:
            raise ConfigError(f"{folder}: {error}") from None
        self.args: Mapping[str, Any] = {}
        self._kind = str(config["model_type"])
        self._stored = stored_tensors(folder)
        if not any(name.startswith(f"model.layers.{self.shape.num_layers}.") for name in self._stored):
            self.shape = dataclasses.replace(
                self.shape, mtp_num_layers=None
            )  # many configs promise what few files have
        check_hugging_face(folder, self.shape, self._kind, self._stored)

    def read(self, entry: Entry) -> torch.Tensor:
        rule, names = self._rule(entry)
        dtype = self.dtype(entry)
        place = entry.expert if rule.stacked else None
        return rule.join([self._find(name).read(place).to(dtype) for name in names], self.shape)

    def dtype(self, entry: Entry) -> torch.dtype:
        """The type that holds every value of all parts, where they have several."""
        return functools.reduce(torch.promote_types, (self._find(name).dtype for name in self._rule(entry)[1]))

    def _rule(self, entry: Entry) -> tuple[hf_tensors.Rule, tuple[str, ...]]:
        """The rule of a tensor and the names of what is read for it."""
        rule, names = hf_tensors.rule_of(entry, self._kind, self.shape)
        return rule, names[:1] if rule.copied else names

    def _find(self, name: str) -> StoredTensor:
        return self._stored[stored_name(name, self._stored) or name]


def write(
    source: TensorSource, folder: Path, kind: str | None, announce: Callable[[Entry], None], part_bytes: int
) -> list[str]:
    """Write a Hugging Face model from a source, in files of at most ``part_bytes`` bytes.

    ``config.json`` is the one in ``source.folder`` with what training changed, where that is of this model; else it is
    made from its shape. ``kind`` None takes the kind that the model had, or that fits the shape. ``announce`` is called
    after each tensor of the source. Returns sentences for the user.

    Tokenizer files of ``source.folder`` come along. Files get their names when all are on the disk, and the one without
    which there is no model gets it last. What an error leaves is removed. ConfigError where a file is there already.
    """
    there = [name for name in ("config.json", *NAMES) if (folder / name).exists()]
    there += sorted(path.name for path in folder.glob("*.safetensors*"))
    if there:
        raise ConfigError(f"--save-dir {folder} already has {there[0]}; give an empty directory")
    shape = source.shape
    rows = shape.vocab_size or shape.padded_vocab_size
    dtype = source.dtype(entries(shape)[0])
    config, notes = returned_config(source.folder, shape, kind, dtype)
    partial = folder / PARTIAL
    new = not folder.exists()
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    named: list[Path] = []
    try:
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        _write_parts(source, partial, str(config["model_type"]), rows, announce, part_bytes)
        tokenizer_files.copy(source.folder, partial, config=False)
        sync_files(partial)
        for path in sorted(partial.iterdir(), key=lambda path: path.name in LAST):
            named.append(folder / path.name)
            os.replace(path, named[-1])
        partial.rmdir()
        sync_path(folder)
    except BaseException:
        for path in named:
            path.unlink(missing_ok=True)
        shutil.rmtree(folder if new else partial, ignore_errors=True)
        raise
    return notes


def _value_of(reader: _Parts, part: Mapping[str, tuple[Entry, Any, Any]], name: str) -> torch.Tensor:
    return reader.value(name, part[name][0])


def _write_parts(
    source: TensorSource, folder: Path, kind: str, rows: int, announce: Callable[[Entry], None], part_bytes: int
) -> None:
    parts = _parts(source, kind, rows, part_bytes)
    index: dict[str, str] = {}
    total = 0
    for number, part in enumerate(parts, 1):
        name = "model.safetensors" if len(parts) == 1 else f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        reader = _Parts(source, kind, rows, announce)
        sizes = {one: (dtype, size) for one, (_, dtype, size) in part.items()}
        total += safetensors_file.write(folder / name, sizes, functools.partial(_value_of, reader, part))
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
        rule, names = hf_tensors.rule_of(entry, kind, source.shape)
        dtype = source.dtype(entry)
        wide = (rows, *entry.shape[1:]) if entry.vocabulary else entry.shape
        made = rule.split(torch.empty(wide, dtype=dtype, device="meta"), source.shape)
        if rule.stacked:  # with the first expert's come those of all
            if entry.expert:
                continue
            made = [one.expand(source.shape.num_experts or 1, *one.shape) for one in made]
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

    def __init__(self, source: TensorSource, kind: str, rows: int, announce: Callable[[Entry], None]) -> None:
        self._source, self._kind, self._rows, self._announce = source, kind, rows, announce
        self._entry: Entry | None = None
        self._made: dict[str, torch.Tensor] = {}

    def value(self, name: str, entry: Entry) -> torch.Tensor:
        if entry != self._entry:
            self._made = {}  # frees the old tensor before the new one is read
            shape = self._source.shape
            rule, names = hf_tensors.rule_of(entry, self._kind, shape)
            if rule.stacked:
                experts = [self._split(rule, entry.of_expert(number)) for number in range(shape.num_experts or 1)]
                parts = [torch.stack(each) for each in zip(*experts, strict=True)]
            else:
                parts = self._split(rule, entry)
            self._made = dict(zip(names, parts, strict=True))
            self._entry = entry
        return self._made[name]

    def _split(self, rule: hf_tensors.Rule, entry: Entry) -> list[torch.Tensor]:
        tensor = self._source.read(entry)
        tensor = with_vocabulary(tensor, self._rows) if entry.vocabulary else tensor
        parts = rule.split(tensor, self._source.shape)
        self._announce(entry)
        return parts
