"""Lets a hybrid model load the checkpoint of a GPT of the same layers, by megatron-core's own translation (since 0.19).

A GPT's layer is two of a hybrid model: the i-th attention and the i-th feed-forward (or experts') layer of the pattern
take its halves. Weights and optimizer state are looked up under the GPT's names; the files stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spare_megatron.config.errors import ConfigError
from spare_megatron.megatron_adapter.checkpoint.distributed_state import BUCKETS
from spare_megatron.megatron_adapter.versions import core_version, release

_GPTS, _HYBRIDS = "decoder.final_layernorm.weight", "decoder.final_norm.weight"
_LAYERS = "decoder.layers."


def retarget(directory: Path, stored: Mapping[str, Any], pattern: str | None, states: Sequence[Any], form: str) -> bool:
    """Point ``states``, requests of a model of this hybrid ``pattern`` (None: a GPT), at a GPT's tensors, where the
    checkpoint has those; returns whether it has. ``stored`` are its tensors by name, ``form`` that of its optimizer
    state where it is loaded.

    Raises ConfigError where the checkpoint is of the other kind of model and cannot be loaded.
    """
    if pattern is None:
        if _HYBRIDS in stored and _GPTS not in stored:
            raise ConfigError(
                f"{directory} is of a hybrid model, and this one is a GPT; run pretrain_hybrid.py with the "
                "--hybrid-layer-pattern that it was saved with"
            )
        return False
    if _GPTS not in stored:
        return False
    if release() < (0, 19):
        raise ConfigError(
            f"{directory} is of a GPT: hybrid models load it with megatron-core 0.19 or later, and {core_version()} is "
            "installed"
        )
    from megatron.core.dist_checkpointing import gpt_checkpoint_interop as core

    wanted = f"--hybrid-layer-pattern {pattern}"
    try:
        maps = core.gpt_compatible_layer_maps(pattern)
    except ValueError as error:
        raise ConfigError(f"{directory} is of a GPT, which does not fit {wanted}: {error}") from None
    layers = {name: one for name, one in stored.items() if name.startswith(_LAYERS)}
    if any(re.match(r"\d+\.", name.removeprefix(_LAYERS)) for name in layers):
        raise ConfigError(
            f"{directory} is of a GPT with layers of several kinds, which megatron-core does not load into a hybrid "
            "model"
        )
    counts = {one.global_shape[0] for one in layers.values() if getattr(one, "prepend_axis_num", 1)}
    if counts and maps.num_gpt_layers not in counts:
        raise ConfigError(
            f"{directory} is of a GPT of {max(counts)} layers, and {wanted} has {maps.num_gpt_layers} of attention; "
            "give a pattern with one of attention and one of feed-forward or experts for each"
        )
    if form == BUCKETS:
        raise ConfigError(
            f"{directory} is of a GPT, and its optimizer state is in Megatron-LM's buckets, which a hybrid model "
            "cannot read; add --no-load-optim, or save it again with --dist-ckpt-optim-fully-reshardable"
        )
    for state in states:
        core.retarget_sharded_state_dict_to_gpt_checkpoint(state, maps)
    return True
