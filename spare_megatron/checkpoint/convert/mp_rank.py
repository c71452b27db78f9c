"""Reads and writes Megatron's older format: one ``model_optim_rng.pt`` for each tensor, pipeline and expert rank.

``iter_0000100/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt`` holds the state of one rank's model, with the layers of its
stage counted from 0. Files are memory-mapped, for writing with a shared mapping, and pages are released after use, so
no rank's model is ever in memory as a whole. Only weights are converted.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.serialization import set_default_mmap_options, skip_data

from spare_megatron.checkpoint.convert.layout import Layout, cut, joined, stage_of
from spare_megatron.checkpoint.convert.model import WORDS, Entry, ModelShape, TensorSource, iteration_of
from spare_megatron.checkpoint.convert.model_args import shape_of_args
from spare_megatron.checkpoint.convert.pages import release
from spare_megatron.checkpoint.convert.stored_names import refuse_unread
from spare_megatron.checkpoint.convert.tensors import entries, is_linear
from spare_megatron.config.errors import ConfigError
from spare_megatron.config.plural import counted
from spare_megatron.megatron_adapter.checkpoint.restricted_pickle import ForbiddenPickleError
from spare_megatron.megatron_adapter.checkpoint.safe_loading import load_weights

FILE = "model_optim_rng.pt"
_RANK = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?(?:_(\d{3}))?$")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_NUMBER = re.compile(r"\.(\d+|None)\.")
IMPLEMENTATIONS = ("transformer_engine", "local")
MAP_SHARED = 1
DUPLICATED = ("linear_q_down_proj", "linear_kv_down_proj")
"""Linear layers that are whole on each tensor-parallel rank with transformer-engine, and split in 'local'."""
LOCAL_NAMES = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "self_attention.linear_q_up_proj.layer_norm_": "self_attention.q_layernorm.",
    "self_attention.linear_kv_up_proj.layer_norm_": "self_attention.kv_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
"""Names of norms with transformer-engine -> those of modules of their own."""


def rank_directory(directory: Path, tensor: int, pipeline: int, expert: int, layout: Layout) -> Path:
    """Where Megatron looks for one rank's file."""
    name = f"mp_rank_{tensor:02d}"
    name += f"_{pipeline:03d}" if layout.pipeline > 1 else ""
    name += f"_{expert:03d}" if layout.expert > 1 else ""
    return directory / name


def inner_name(entry: Entry, layer: int | None, expert: int | None, implementation: str) -> str:
    """The name of a tensor inside one rank's model, with the rank's own numbers of the layer and the expert.

    In transformer-engine's implementation norms are part of the linear layers; 'local' has modules of their own.
    """
    name = entry.name
    if entry.layer is not None:
        name = name.replace(f"decoder.layers.{entry.layer}.", f"decoder.layers.{layer}.")
    if entry.expert is not None:
        name = name.replace(f"mlp.experts.{entry.expert}.", f"mlp.experts.local_experts.{expert}.")
    for engine, local in LOCAL_NAMES.items() if implementation == "local" else ():
        name = name.replace(engine, local)
    return name


class MpRankSource:
    """A source that reads one checkpoint in this format."""

    def __init__(self, directory: Path) -> None:
        self.folder = directory
        files = {path.name: path / FILE for path in sorted(directory.iterdir()) if _RANK.match(path.name)}
        first = _load(next(iter(files.values())))
        args = first.get("args")
        if not isinstance(args, argparse.Namespace):
            raise ConfigError(
                f"{directory} was saved without args, so its model is not known; convert one that was saved with args"
            )
        self.args: Mapping[str, Any] = vars(args)
        self.iteration = iteration_of(first.get("iteration"))
        self.layout = Layout(
            self.args.get("tensor_model_parallel_size", 1),
            self.args.get("pipeline_model_parallel_size", 1),
            self.args.get("expert_model_parallel_size", 1) or 1,
        )
        apart = (self.args.get("expert_tensor_parallel_size") or self.layout.tensor) != self.layout.tensor
        if apart and self.args.get("num_experts"):
            raise ConfigError(f"{directory} has expert tensor parallelism of its own, which is not converted")
        self._states = self._all(directory)
        self._first_layers = self._stages()
        self.shape = shape_of_args(self.args, str(directory))
        self._refuse_unread()

    def _refuse_unread(self) -> None:
        """Weights that no tensor of the model is read from would be lost without a message."""
        known = {inner_name(entry, None, None, kind) for entry in entries(self.shape) for kind in IMPLEMENTATIONS}
        known = {_NUMBER.sub(".N.", name) for name in known}
        if self.shape.untie_embeddings_and_output_weights or self.layout.pipeline > 1:
            known.add("output_layer.weight")
        unread = {
            name
            for chunks in self._states.values()
            for chunk in chunks
            for name in chunk
            if not name.endswith("_extra_state") and _NUMBER.sub(".N.", name) not in known
        }
        refuse_unread(self.folder, unread, "args")

    def _all(self, directory: Path) -> dict[tuple[int, int, int], list[dict[str, Any]]]:
        """(tensor, pipeline, expert rank) -> the states of its model chunks (several with virtual stages)."""
        found = {}
        for tensor in range(self.layout.tensor):
            for pipeline in range(self.layout.pipeline):
                for expert in range(self.layout.expert):
                    path = rank_directory(directory, tensor, pipeline, expert, self.layout) / FILE
                    if not path.is_file():
                        raise ConfigError(f"{path} is missing; copy all ranks' directories of the checkpoint")
                    state = _load(path)
                    names = sorted((name for name in state if re.fullmatch(r"model\d*", name)), key=_chunk)
                    if not names or "language_model" in state[names[0]]:
                        raise ConfigError(
                            f"{path} holds a model from before megatron-core; convert it with Megatron-LM's own "
                            "tools/checkpoint/convert.py --loader legacy --saver core first"
                        )
                    found[tensor, pipeline, expert] = [state[name] for name in names]
        return found

    def _stages(self) -> list[tuple[int, int, int, int]]:
        """(first layer, last layer + 1, pipeline rank, chunk) of every chunk, from the layers that the files hold."""
        spans, at = [], 0
        for chunk in range(len(self._states[0, 0, 0])):
            for pipeline in range(self.layout.pipeline):
                names = self._states[0, pipeline, 0][chunk]
                numbers = {int(match[1]) for name in names if (match := _LAYER.match(name))}
                spans.append((at, at + len(numbers), pipeline, chunk))
                at += len(numbers)
        return spans

    def read(self, entry: Entry) -> torch.Tensor:
        parts = self._parts(entry)
        whole = joined(parts, entry)
        whole = whole.clone() if whole is parts[0] else whole
        for part in parts:
            release(part)
        return whole

    def dtype(self, entry: Entry) -> torch.dtype:
        return self._parts(entry)[0].dtype

    def _parts(self, entry: Entry) -> list[torch.Tensor]:
        """The part of each tensor-parallel rank, memory-mapped and not read yet."""
        layer, pipeline, chunk = self._place(entry)
        rank, expert = 0, None
        if entry.expert is not None:
            rank, expert = divmod(entry.expert, (self.shape.num_experts or 1) // self.layout.expert)
        names = [inner_name(entry, layer, expert, kind) for kind in IMPLEMENTATIONS]
        parts = []
        for tensor in range(self.layout.tensor):
            state = self._states[tensor, pipeline, rank][chunk]
            found = next((state[name] for name in names if name in state), None)
            if found is None:
                raise ConfigError(f"{self.folder} has no tensor {names[0]}, which a model of its args has")
            parts.append(found)
        return parts

    def _place(self, entry: Entry) -> tuple[int | None, int, int]:
        """(layer inside its chunk, pipeline rank, chunk) of a tensor."""
        if entry.layer is None or entry.predicts:
            last = self._first_layers[-1]
            return (None, 0, 0) if entry.name.startswith("embedding.") else (None, last[2], last[3])
        for begin, end, pipeline, chunk in self._first_layers:
            if begin <= entry.layer < end:
                return entry.layer - begin, pipeline, chunk
        raise ConfigError(
            f"{self.folder} has {counted(self._first_layers[-1][1], 'layer')}, but its args say {self.shape.num_layers}"
        )


def _chunk(name: str) -> int:
    """The number of a model chunk: 10 of ``model10``, which comes after ``model9``."""
    return int(name.removeprefix("model") or 0)


def _load(path: Path) -> dict[str, Any]:
    """The content of a rank's file, with tensors memory-mapped. Only tensors, plain values and a few harmless classes
    are unpickled; ConfigError for any other file."""
    from spare_megatron.megatron_adapter.shims import install_cpu_shims

    install_cpu_shims()
    try:
        return dict(load_weights(path, mmap=True))
    except ForbiddenPickleError as error:
        raise ConfigError(f"{error}; give a checkpoint that Megatron wrote") from None
    except Exception as error:  # torch raises many kinds for damaged files and for classes that are not allowed
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"{path} cannot be read: {reason}; give a checkpoint that Megatron wrote") from error


def write(
    source: TensorSource,
    directory: Path,
    args: Mapping[str, Any],
    layout: Layout,
    implementation: str,
    announce: Callable[[Entry], None],
) -> None:
    """Write the weights of a source into ``directory``, split for ``layout``; ``announce`` is called after each
    tensor."""
    top = {"args": argparse.Namespace(**args), "checkpoint_version": 3.0, "iteration": source.iteration}
    ranks = [
        (tensor, pipeline, expert)
        for pipeline in range(layout.pipeline)
        for tensor in range(layout.tensor)
        for expert in range(layout.expert)
    ]
    for rank in ranks:
        folder = rank_directory(directory, *rank, layout)
        folder.mkdir(parents=True)
        with (folder / FILE).open("wb") as file:
            with skip_data():  # leaves holes in the file for tensors whose values follow
                torch.save({**top, "model": _empty(source, rank, layout, implementation)}, file)
            file.flush()
            os.posix_fallocate(file.fileno(), 0, file.tell())  # a full disk is an error here; in a mapping it kills
    files = {rank: rank_directory(directory, *rank, layout) / FILE for rank in ranks}
    with _shared_mappings():
        states = {rank: _load(path)["model"] for rank, path in files.items()}
    for entry in entries(source.shape):
        parts = cut(source.read(entry), _split(entry, implementation), layout.tensor)
        for rank in ranks:
            for name in _names(entry, rank, source.shape, layout, implementation):
                states[rank][name].copy_(parts[rank[0]])
                release(states[rank][name])
        announce(entry)


def _split(entry: Entry, implementation: str) -> Entry:
    """The entry as an implementation splits it over ranks."""
    whole = implementation == "transformer_engine" and any(f".{name}." in entry.name for name in DUPLICATED)
    return dataclasses.replace(entry, axis=None) if whole else entry


def _names(
    entry: Entry, rank: tuple[int, int, int], shape: ModelShape, layout: Layout, implementation: str
) -> Iterator[str]:
    """The names under which a rank holds a tensor: one or none; the last stage holds tied embeddings as its output
    layer too, and embeddings for the layers that predict more tokens."""
    _, pipeline, expert = rank
    tied = entry.name == WORDS and not shape.untie_embeddings_and_output_weights
    if layout.pipeline > 1 and pipeline == layout.pipeline - 1:
        if tied:
            yield "output_layer.weight"
        if entry.name == WORDS and shape.mtp_num_layers:
            yield WORDS
    if stage_of(entry, shape, layout) != pipeline:
        return
    inside = None
    if entry.expert is not None:
        owner, inside = divmod(entry.expert, (shape.num_experts or 1) // layout.expert)
        if owner != expert:
            return
    layer = None if entry.layer is None or entry.predicts else entry.layer % (shape.num_layers // layout.pipeline)
    yield inner_name(entry, layer, inside, implementation)


def _empty(source: TensorSource, rank: tuple[int, int, int], layout: Layout, implementation: str) -> dict[str, Any]:
    """A rank's state with tensors that have no values yet, and the empty ``_extra_state`` that linear layers expect."""
    state: dict[str, Any] = {}
    for entry in entries(source.shape):
        for name in _names(entry, rank, source.shape, layout, implementation):
            sizes, axis = list(entry.shape), _split(entry, implementation).axis
            if axis is not None:
                sizes[axis] //= layout.tensor
            state[name] = torch.empty(sizes, dtype=source.dtype(entry))
            module = name.removesuffix(".weight")
            if is_linear(entry):
                state[f"{module}._extra_state"] = None
            if name.endswith("linear_proj.weight") and implementation == "transformer_engine":
                state[module.replace("linear_proj", "core_attention") + "._extra_state"] = None
    if rank[1] == layout.pipeline - 1:
        state["output_layer._extra_state"] = None
    return state


@contextmanager
def _shared_mappings() -> Iterator[None]:
    """Inside, ``torch.load(mmap=True)`` maps files so that what is written to a tensor goes into its file."""
    with set_default_mmap_options(MAP_SHARED):
        yield
