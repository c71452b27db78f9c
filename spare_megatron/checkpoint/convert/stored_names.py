"""Compares the tensors that a checkpoint stores with those that a conversion reads.

A tensor that nobody reads is a part of the model that would be lost without a message: another output layer, the scales
of quantized weights, biases that the config does not announce. So it is refused, with its name, before anything is
read. So are names that are missing and shapes that differ.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import torch

from spare_megatron.checkpoint.convert.hf_files import StoredTensor
from spare_megatron.checkpoint.convert.hf_tensors import rule_of
from spare_megatron.checkpoint.convert.model import WORDS, Entry, ModelShape
from spare_megatron.checkpoint.convert.tensors import entries
from spare_megatron.config.errors import ConfigError

WHOLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""The types of weights that are not quantized."""
OUTPUT = "lm_head.weight"
_BUFFERS = re.compile(
    r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)|model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
)
"""Constants that old versions of transformers stored; it ignores them itself."""
_LAYER = re.compile(r"(?:model\.layers|(?:transformer\.)?h)\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def stored_name(name: str, stored: Collection[str]) -> str | None:
    """The name under which a directory has a tensor; None where it has not. The first conversions of OpenAI's GPT-2
    have names without 'transformer.'."""
    return next((known for known in (name, name.removeprefix("transformer.")) if known in stored), None)


def check_hugging_face(folder: Path, shape: ModelShape, kind: str, stored: Mapping[str, StoredTensor]) -> None:
    """ConfigError where the stored tensors are not those of the model that ``config.json`` describes."""
    quantized = sorted(name for name, one in stored.items() if one.dtype not in WHOLE and not _BUFFERS.fullmatch(name))
    if quantized:
        raise ConfigError(
            f"{folder} has {_some(quantized)} as {str(stored[quantized[0]].dtype).removeprefix('torch.')}, but only "
            "whole weights are converted; fetch the model in bf16, fp16 or fp32"
        )
    _check_numbers(folder, shape, kind, stored)
    read = set()
    for entry in entries(shape):
        for name, wanted in _wanted(entry, shape, kind):
            known = stored_name(name, stored)
            if known is None:
                raise ConfigError(
                    f"{folder} has no tensor {name}, which its config.json promises; fetch the model again"
                )
            if tuple(stored[known].shape) != wanted:
                raise ConfigError(
                    f"{folder} has {known} of shape {_of(stored[known].shape)}, but by its config.json it has "
                    f"{_of(wanted)}; fetch the model and its config again"
                )
            read.add(known)
        _check_copies(entry, shape, kind, stored)
    unread = sorted(name for name in stored if name not in read and not _BUFFERS.fullmatch(name))
    if unread == [OUTPUT] and not shape.untie_embeddings_and_output_weights:
        words = stored_name(rule_of(Entry(WORDS, ()), kind, shape)[1][0], stored)
        if words is not None and same(stored[OUTPUT], stored[words]):
            return
        raise ConfigError(
            f"{folder} has a {OUTPUT} that differs from {words}, but its config.json has tie_word_embeddings true; "
            "set it to false to keep that output layer, or remove the tensor"
        )
    refuse_unread(folder, unread, "config.json")


def _check_copies(entry: Entry, shape: ModelShape, kind: str, stored: Mapping[str, StoredTensor]) -> None:
    rule, names = rule_of(entry, kind, shape)
    for name in names[1:] if rule.copied else ():
        if not same(stored[name], stored[names[0]]):
            raise ConfigError(f"{name} differs from {names[0]}, of which megatron-core has one; make them equal")


def refuse_unread(folder: Path, unread: Collection[str], by: str) -> None:
    """ConfigError where there are tensors that nobody reads; ``by`` names what describes the model."""
    if unread:
        raise ConfigError(
            f"{folder} has {_some(sorted(unread))}, which the model of its {by} has not and a conversion would lose; "
            f"correct {by}, or remove what does not belong to the model"
        )


def _check_numbers(folder: Path, shape: ModelShape, kind: str, stored: Iterable[str]) -> None:
    """Layers and experts are counted first: a wrong number may be so large that a list of its tensors is too."""
    names = list(stored)
    layers = shape.num_layers + (shape.mtp_num_layers or 0)
    for what, pattern, reported in (("layer", _LAYER, layers), ("expert", _EXPERT, shape.num_experts)):
        found = 1 + max((int(match[1]) for name in names if (match := pattern.search(name))), default=-1)
        if what == "expert" and kind == "gpt_oss":  # whose experts' tensors are one, of which the shape is checked
            continue
        if reported is not None and reported != found and (reported > found or what == "expert"):
            raise ConfigError(
                f"{folder} has weights of {found} {what}s, but its config.json says {reported}; fetch the model again"
            )


def _wanted(entry: Entry, shape: ModelShape, kind: str) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of Hugging Face's tensors from which a tensor is made."""
    rule, names = rule_of(entry, kind, shape)
    try:
        made = rule.split(torch.empty(entry.shape, device="meta"), shape)
    except (RuntimeError, OverflowError, TypeError, ValueError) as error:  # more elements than torch can count
        raise ConfigError(f"config.json gives {names[0]} the size {_of(entry.shape)}, which is too large") from error
    lead = (shape.num_experts or 1,) if rule.stacked else ()
    return [(name, (*lead, *one.shape)) for name, one in zip(names, made, strict=True)]


def same(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two tensors have the same bits."""
    if one.dtype != other.dtype or tuple(one.shape) != tuple(other.shape):
        return False
    return torch.equal(*(tensor.read().flatten().view(torch.uint8) for tensor in (one, other)))


def _of(shape: Iterable[int]) -> str:
    return "x".join(map(str, shape)) or "of one number"


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more tensors" if len(names) > 3 else "")
