"""Runs one conversion: opens the checkpoint, adapts it, and writes the result, which gets its final name last."""

from __future__ import annotations

import dataclasses
import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from spare_megatron.checkpoint import folder
from spare_megatron.checkpoint.convert import hugging_face, layout, mp_rank, tokenizer_files, torch_dist, torch_own
from spare_megatron.checkpoint.convert.layout import Layout
from spare_megatron.checkpoint.convert.model import Entry, ModelShape, TensorSource
from spare_megatron.checkpoint.convert.model_args import (
    IDS,
    args_of_shape,
    flags_of_shape,
    refuse_unknown_to_transformers,
)
from spare_megatron.checkpoint.convert.returned_config import differs, travelled_config
from spare_megatron.checkpoint.convert.tensors import EXPERT_BIAS, entries
from spare_megatron.checkpoint.files import entries_of, sync_files
from spare_megatron.checkpoint.saved_args import plain
from spare_megatron.config.errors import ConfigError
from spare_megatron.config.plural import counted

_NUMBER = re.compile(r"\.\d+\.")
FLAGS_FILE = "model_flags.txt"


@dataclass(frozen=True)
class Wish:
    """What a conversion is to write."""

    saver: str
    """'torch_dist', 'mp_rank' or 'hf'."""
    layout: Layout | None = None
    """Parallel degrees to write for; None keeps those of the checkpoint that is read."""
    implementation: str = "transformer_engine"
    dtype: torch.dtype | None = None
    """dtype of all tensors; None keeps that of each tensor."""
    vocab_size: int | None = None
    """Number of ids of the tokenizer; None takes it from the checkpoint, where it says it."""
    divisible_by: int | None = None
    """Pad the vocabulary to a multiple of this times the tensor-parallel size; None pads only where it is needed."""
    hf_kind: str | None = None
    tokenizer_model: Path | None = None
    part_bytes: int = hugging_face.PART_BYTES_MAX


class Prepared:
    """A source whose tensors get another padding of the vocabulary and another dtype."""

    def __init__(self, source: TensorSource, shape: ModelShape, dtype: torch.dtype | None) -> None:
        self._source, self._dtype, self.shape = source, dtype, shape
        self.iteration, self.args, self.folder = source.iteration, source.args, source.folder
        self._types: dict[str, torch.dtype] = {}
        for entry in entries(shape):
            found, key = source.dtype(entry), _without_numbers(entry)
            self._types[key] = torch.promote_types(self._types.get(key, found), found)

    def read(self, entry: Entry) -> torch.Tensor:
        tensor = self._source.read(entry)
        if entry.vocabulary:
            tensor = layout.with_vocabulary(tensor, entry.shape[0])
        if tuple(tensor.shape) != entry.shape:
            raise ConfigError(
                f"{entry.name} has shape {tuple(tensor.shape)}, but by its flags the model has {entry.shape}"
            )
        return tensor.to(self.dtype(entry))

    def dtype(self, entry: Entry) -> torch.dtype:
        """One type for all layers, because torch_dist stores them as one tensor: the type that holds every value.
        Experts' biases keep theirs, as megatron-core has them in fp32 whatever the type of the weights."""
        own = self._types[_without_numbers(entry)]
        return self._dtype if self._dtype is not None and not entry.name.endswith(EXPERT_BIAS) else own


def _without_numbers(entry: Entry) -> str:
    return _NUMBER.sub(".N.", entry.name)


def open_source(load_dir: Path, loader: str) -> tuple[TensorSource, str]:
    """Open the checkpoint in a directory; returns its source and the name of its format.

    ``loader`` is 'hf', or any other value for Megatron's formats. ConfigError where there is no good checkpoint.
    """
    if loader == "hf":
        return hugging_face.HuggingFaceSource(load_dir), "hf"
    if not load_dir.is_dir():
        raise ConfigError(f"--load-dir {load_dir} does not exist; give a directory of checkpoints")
    directory = _iteration(load_dir)
    reason = folder.damage(directory)
    if folder.torch_own(directory):
        return torch_own.TorchOwnSource(directory), "torch's own format"
    if (directory / "metadata.json").exists():
        if reason:
            raise ConfigError(f"{reason}; use another checkpoint")
        from spare_megatron.megatron_adapter.checkpoint.group_checkpoint import read_common

        return torch_dist.TorchDistSource(directory, read_common(directory)), "torch_dist"
    if any(directory.glob("mp_rank_*")):
        return mp_rank.MpRankSource(directory), "mp_rank"
    raise ConfigError(f"{directory} holds neither a torch_dist checkpoint nor mp_rank_* directories; use --loader hf")


def _iteration(load_dir: Path) -> Path:
    """The checkpoint that the tracker file of a ``--save`` directory names; without that file the newest one, the one
    of no step, or the directory itself."""
    if (load_dir / folder.TRACKER).is_file():
        directory, missing = folder.tracked(load_dir)
        if directory is None or missing:
            raise ConfigError(f"{missing}; correct the file or give the checkpoint's own directory with --load-dir")
        return directory
    steps, release = folder.iterations(load_dir), load_dir / folder.RELEASE
    if steps:
        return load_dir / folder.iteration_name(steps[0])
    return release if release.is_dir() else load_dir


def _true_rows(shape: ModelShape, origin: Path) -> int | None:
    """Number of rows of the vocabulary that are no padding: those of the tokenizer that trained, and those with which
    the model came, whose files are in ``origin``. None where neither is known."""
    came = travelled_config(origin)
    known = shape.vocab_size
    if came is not None and not differs(came[1], shape):
        known = max(known or 0, came[1].padded_vocab_size)
    return None if known is None else min(known, shape.padded_vocab_size)


def prepare(source: TensorSource, found: str, wish: Wish, origin: Path) -> tuple[Prepared, Layout]:
    """The source, adapted to the wish, and the layout to write; ``found`` is the source's format, and ``origin`` the
    directory of what came with the model."""
    old = source.layout if isinstance(source, mp_rank.MpRankSource) else Layout()
    new = wish.layout or old
    shape = source.shape
    known = wish.vocab_size or shape.vocab_size
    if wish.vocab_size is not None and wish.vocab_size > shape.padded_vocab_size:
        raise ConfigError(
            f"--true-vocab-size {wish.vocab_size} is more than the {shape.padded_vocab_size} rows of the checkpoint; "
            "give the number of ids of its tokenizer"
        )
    if found != "hf" and wish.vocab_size is None:
        known = _true_rows(shape, origin)
    rows = shape.padded_vocab_size
    if wish.saver != "hf" and known is not None and (wish.divisible_by or found == "hf"):
        rows = layout.padded(known, wish.divisible_by or 128, new.tensor)
    elif wish.saver != "hf" and rows % new.tensor:
        rows = layout.padded(known or rows, 128, new.tensor)
    shape = dataclasses.replace(shape, padded_vocab_size=rows, vocab_size=known)
    layout.check(shape, new)
    return Prepared(source, shape, wish.dtype), new


def convert(
    load_dir: Path, loader: str, save_dir: Path, wish: Wish, announce: Callable[[Entry, int, int], None]
) -> str:
    """Convert a checkpoint; returns a sentence that says what was written.

    ``announce`` is called after each tensor with its entry, the bytes written so far and the bytes of all tensors.
    ConfigError where the conversion is impossible.
    """
    source, found = open_source(load_dir, loader)
    origin = f"{found} in {source.folder}"
    files = load_dir if found == "hf" else tokenizer_files.folder_of(load_dir)
    prepared, new = prepare(source, found, wish, files)
    total, done = sum(_bytes(entry, prepared) for entry in entries(prepared.shape)), 0

    def reported(entry: Entry) -> None:
        nonlocal done
        done += _bytes(entry, prepared)
        announce(entry, done, total)

    if wish.saver == "hf":
        refuse_unknown_to_transformers(source.args, str(load_dir))
        prepared.folder = files
        notes = hugging_face.write(prepared, save_dir, wish.hf_kind, reported, wish.part_bytes)
        travelled = [name for name in tokenizer_files.NAMES if (save_dir / name).is_file()]
        return "; ".join([_sentence(origin, "hf", prepared, save_dir, travelled), *notes])
    directory = save_dir / folder.iteration_name(prepared.iteration)
    if directory.exists():
        raise ConfigError(f"{directory} exists already; give another --save-dir")
    later = [step for step in folder.iterations(save_dir) if step > prepared.iteration]
    if later:
        raise ConfigError(
            f"--save-dir {save_dir} has a checkpoint of step {later[0]}, and Megatron's tools would take this one of "
            f"step {prepared.iteration} for the newest; give another --save-dir"
        )
    partial = save_dir / folder.PARTIAL / f"{directory.name}.convert"
    with _removed_on_error(save_dir, partial):
        shutil.rmtree(partial, ignore_errors=True)
        partial.parent.mkdir(parents=True, exist_ok=True)
        travelled = tokenizer_files.copy(files, save_dir / tokenizer_files.FOLDER, config=True)
        args = _args(prepared, new, wish, save_dir)
        if wish.saver == "torch_dist":
            torch_dist.write(prepared, partial, args, new, reported)
            folder.write_manifest(partial, entries_of(partial))
        else:
            mp_rank.write(prepared, partial, args, new, wish.implementation, reported)
        sync_files(partial)
        words = flags_of_shape(prepared.shape, prepared.dtype(entries(prepared.shape)[0]))
        (save_dir / FLAGS_FILE).write_text(shlex.join(words) + "\n")
        folder.publish(partial, save_dir, prepared.iteration)
    with suppress(OSError):  # others are in the making there
        partial.parent.rmdir()
    return _sentence(origin, wish.saver, prepared, save_dir, travelled)


@contextmanager
def _removed_on_error(save_dir: Path, partial: Path) -> Iterator[None]:
    """Remove what an error inside leaves of a checkpoint in ``partial``, and ``save_dir`` if it was made inside."""
    new = not save_dir.exists()
    try:
        yield
    except BaseException:
        if new:
            shutil.rmtree(save_dir, ignore_errors=True)
        else:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _bytes(entry: Entry, source: TensorSource) -> int:
    return torch.Size(entry.shape).numel() * source.dtype(entry).itemsize


def _args(source: Prepared, new: Layout, wish: Wish, save_dir: Path) -> Mapping[str, Any]:
    """Megatron's args of the result: those of the checkpoint that was read, with what a conversion changes."""
    dtype = source.dtype(entries(source.shape)[0])
    values = {**source.args, **args_of_shape(source.shape, dtype, new.tensor, new.pipeline, new.expert)}
    for name in ("consumed_train_samples", "consumed_valid_samples", "seq_length"):
        values[name] = source.args.get(name, values[name])
    values["vocab_size"] = source.args.get("vocab_size", source.shape.vocab_size)
    values[IDS] = source.shape.vocab_size
    values["virtual_pipeline_model_parallel_size"] = values["num_layers_per_virtual_pipeline_stage"] = None
    values["expert_tensor_parallel_size"] = new.tensor
    values["sequence_parallel"] = bool(source.args.get("sequence_parallel")) and new.tensor > 1
    values["params_dtype"] = dtype
    values["transformer_impl"] = wish.implementation
    model = _tokenizer_model(wish, save_dir)
    if model is not None and (wish.tokenizer_model or values.get("tokenizer_model") is None):
        values["tokenizer_model"] = str(model.absolute())
        kind = "Llama2Tokenizer" if model.name.endswith(".model") else "HuggingFaceTokenizer"
        values["tokenizer_type"] = values.get("tokenizer_type") or kind
    return plain(values) if wish.saver == "torch_dist" else values


def _tokenizer_model(wish: Wish, save_dir: Path) -> Path | None:
    files = save_dir / tokenizer_files.FOLDER
    if wish.tokenizer_model is not None:
        return wish.tokenizer_model
    if (files / "tokenizer.model").is_file():
        return files / "tokenizer.model"
    return files if (files / "tokenizer.json").is_file() else None


def _sentence(origin: str, made: str, source: Prepared, save_dir: Path, travelled: list[str]) -> str:
    parameters = sum(torch.Size(entry.shape).numel() for entry in entries(source.shape))
    copied = f"copied {', '.join(travelled)}" if travelled else "no tokenizer files were found to copy"
    layers = counted(source.shape.num_layers, "layer")
    return f"{origin} -> {made}: wrote {parameters:,} values of {layers} to {save_dir}; {copied}"
