"""Reads ``--pipeline-model-parallel-layout`` as megatron-core does, without importing it.

The language is that of megatron-core's ``PipelineParallelLayerLayout``: stages are separated by ``|``; a stage is a
word of the letters E (embedding), t (a decoder layer), m (a layer of multi-token prediction) and L (loss); ``x*n``
repeats a letter or a bar, ``(...)*n`` what is in the parentheses, of which there is one level; commas are for the eye.
A test compares the two readers.
"""

from __future__ import annotations

import re
from argparse import Namespace
from itertools import groupby

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.plural import counted
from spare_megatron.config.rows import RowCut, shapes_of
from spare_megatron.config.stage_cut import StageCut
from spare_megatron.flags import core_versions

FLAG = "--pipeline-model-parallel-layout"
LETTERS = {"E": "embedding", "t": "decoder layer", "m": "layer of multi-token prediction", "L": "loss"}
STAGES_MAX = 4096
CORE_OF_SMALLER_UNITS = (0, 19)
"""megatron-core whose last unit of layers that are computed again may be smaller than the others."""


def stages_of(text: str) -> list[str]:
    """The stages of a layout, each a word of :data:`LETTERS`; ConfigError where a part cannot be read."""
    repeats = [int(times) for times in re.findall(r"\*(\d+)", text)]
    if any(times > STAGES_MAX for times in repeats):
        raise ConfigError(f"{FLAG} {text!r} repeats a part {max(repeats)} times; the most is {STAGES_MAX}")
    spread = text.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        spread = re.sub(pattern, lambda found: found.group(1) * int(found.group(2)), spread)
    strange = sorted(set(spread) - {*LETTERS, "|"})
    if strange:
        raise ConfigError(
            f"{FLAG} {text!r} has {' '.join(map(repr, strange))}; a stage is made of E, t, m and L, stages are "
            "separated by |, and parts are repeated by x*n or (...)*n, as in 'Et*3|(tt|)*14tL'"
        )
    return spread.split("|")


def check_layout(text: str, pipeline: int, layers: int, predicted: int = 0) -> list[str]:
    """The stages, where they fit ``pipeline`` ranks and a model of ``layers`` decoder layers and ``predicted`` layers
    of multi-token prediction; else ConfigError."""
    stages = stages_of(text)
    if len(stages) % pipeline:
        nearest = max(1, round(len(stages) / pipeline)) * pipeline
        raise ConfigError(
            f"{FLAG} has {counted(len(stages), 'stage')}, not a multiple of --pipeline-model-parallel-size {pipeline}; "
            f"use {nearest} stages"
        )
    flat = "".join(stages)
    for letter, place in (("E", 0), ("L", -1)):
        if flat.count(letter) != 1 or flat[place] != letter:
            where = "begin" if letter == "E" else "end"
            raise ConfigError(f"{FLAG} {text!r} must {where} with {letter}, for the {LETTERS[letter]}, and have one")
    for letter, named, number in (("t", "--num-layers", layers), ("m", "--mtp-num-layers", predicted)):
        if flat.count(letter) != number:
            reported = counted(flat.count(letter), LETTERS[letter], LETTERS[letter].replace("layer", "layers"))
            raise ConfigError(f"{FLAG} has {reported} ({letter}) and {named} is {number}; let them agree")
    if not stages[-1].endswith("m" * predicted + "L"):
        raise ConfigError(
            f"{FLAG} {text!r} has layers of multi-token prediction before the last stage or before other layers; put "
            f"all of them right before L, as in '...|{'m' * predicted}L'"
        )
    return stages


def cut_of(ns: Namespace) -> StageCut:
    """The division of a GPT model's layers that resolved flags ask for."""
    layout = ns.pipeline_model_parallel_layout
    return StageCut(
        ns.num_layers,
        ns.pipeline_model_parallel_size,
        ns.virtual_pipeline_model_parallel_size,
        first=ns.decoder_first_pipeline_num_layers,
        last=ns.decoder_last_pipeline_num_layers,
        counts_embedding=ns.account_for_embedding_in_pipeline_split,
        counts_loss=ns.account_for_loss_in_pipeline_split,
        layout=() if layout is None else tuple(stages_of(layout)),
    )


def row_cut_of(ns: Namespace) -> RowCut:
    """The division of a model's layers into rows, and the smaller shapes, that resolved flags ask for. Raises
    ConfigError."""
    cut = cut_of(ns)
    whole = "layers of --hybrid-layer-pattern stay together" if ns.hybrid_layer_pattern else cut.whole_stages()
    overlaps = "sums of several rows do not overlap the backward pass" if ns.overlap_grad_reduce else ""
    shapes = shapes_of(ns.spare_shapes, cut.stages, whole, overlaps)
    if recomputes_whole_units():
        uneven = {one: sizes for one in shapes if (sizes := uneven_sizes(ns, cut.with_stages(one)))}
        if uneven and ns.spare_shapes != "auto":
            stages, sizes = next(iter(uneven.items()))
            raise ConfigError(
                f"--spare-shapes {ns.spare_shapes}: with {counted(stages, 'pipeline stage')} one has "
                f"{counted(sizes[0], 'layer')}, no multiple of --recompute-num-layers {ns.recompute_num_layers}; "
                "use --recompute-num-layers 1, or --spare-shapes auto"
            )
        shapes = tuple(one for one in shapes if one not in uneven)
    return RowCut(cut, shapes)


def recomputes_whole_units() -> bool:
    """Whether the installed megatron-core computes layers again only in whole units of ``--recompute-num-layers``."""
    return core_versions.installed() < CORE_OF_SMALLER_UNITS


def uneven_sizes(ns: Namespace, cut: StageCut) -> list[int]:
    """The numbers of layers in chunks of a division that are no multiple of the unit of
    ``--recompute-method uniform``."""
    units = ns.recompute_granularity == "full" and ns.recompute_method == "uniform"
    each = (ns.recompute_num_layers or 1) if units else 1
    return [size for size in cut.sizes() if size % each]


def layout_text(stages: list[str], pipeline: int) -> str:
    """What each rank of a pipeline builds: '2 stages on each of 4 ranks; layers of the stages: E+3, 2 x 6, 1+L'."""
    words = [
        "+".join(filter(None, (*re.findall("E", one), f"{one.count('t')}", *re.findall("m|L", one)))) for one in stages
    ]
    runs = [(word, len(list(same))) for word, same in groupby(words)]
    shown = ", ".join(word if count == 1 else f"{count} x {word}" for word, count in runs)
    each = f"{counted(len(stages) // pipeline, 'stage')} on each of {counted(pipeline, 'rank')}"
    return f"{each}; layers of the stages: {shown}"
