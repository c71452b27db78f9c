"""Names of a rank's tensors that do not depend on how the model is split over stages: with the layer's number in the
model, as megatron-core's checkpoints have them, and without chunk and wrappers.

Ranks that have parts of one tensor (tensor and expert parallel) have the same name for it, and so have stages that have
the same layer under other splits. The copies of tied embeddings keep the names of the modules that use them:
``embedding.word_embeddings.weight`` where tokens are embedded, ``output_layer.weight`` on a last stage that is not the
first, ``mtp.embedding...`` where only prediction layers embed. Promises: the names of one rank differ.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def unwrapped(chunk: torch.nn.Module) -> torch.nn.Module:
    """The model in a chunk's wrappers."""
    while isinstance(inner := getattr(chunk, "module", None), torch.nn.Module):
        chunk = inner
    return chunk


def global_names(chunks: Sequence[torch.nn.Module]) -> list[dict[str, str]]:
    """For each chunk of a rank, name in the chunk's model -> name in the whole model, of all parameters and buffers."""
    taken: set[str] = set()
    found = []
    for number, chunk in enumerate(chunks):
        model = unwrapped(chunk)
        layers = _numbered(model)
        names = {}
        for name in (*dict(model.named_parameters(remove_duplicate=False)), *dict(model.named_buffers())):
            there = _in_model(model, name, layers)
            # models of other classes may number their layers in each chunk anew
            names[name] = f"{there} of chunk {number}" if there in taken else there
        taken |= set(names.values())
        found.append(names)
    return found


def parameter_names(chunks: Sequence[torch.nn.Module]) -> dict[torch.nn.Parameter, str]:
    """The name in the whole model of each parameter of a rank's chunks."""
    found: dict[torch.nn.Parameter, str] = {}
    for chunk, names in zip(chunks, global_names(chunks), strict=True):
        found |= {parameter: names[name] for name, parameter in unwrapped(chunk).named_parameters()}
    return found


def _numbered(model: torch.nn.Module) -> dict[str, str]:
    """Path of each layer in the chunk -> its path with its number in the model, from 0."""
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        parent, _, last = path.rpartition(".")
        number = getattr(module, "layer_number", None)
        if last.isdecimal() and isinstance(number, int):
            found[path] = f"{parent}.{number - 1}"
    return found


def _in_model(model: torch.nn.Module, name: str, layers: dict[str, str]) -> str:
    if name.startswith("embedding.") and not getattr(model, "pre_process", True):
        return f"mtp.{name}"
    path = name
    while path:
        path = path.rpartition(".")[0]
        if path in layers:
            return layers[path] + name[len(path) :]
    return name
