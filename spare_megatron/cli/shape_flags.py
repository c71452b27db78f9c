"""The flags of spare-plan and spare-simulate that say with how many pipeline stages a group trains that misses
nodes."""

from __future__ import annotations

import argparse
from typing import Any

from spare_megatron.cli.commands import refuse_without
from spare_megatron.config.errors import ConfigError
from spare_megatron.config.rows import shapes_of


def add_shape_flags(made: argparse.ArgumentParser) -> None:
    """Add them to a command line."""
    add = made.add_argument
    add(
        "--pipeline-model-parallel-size",
        type=int,
        metavar="PP",
        help="pipeline stages of a group; one that misses nodes then trains with fewer (--spare-shapes)",
    )
    add(
        "--spare-shapes",
        metavar="auto|none|LIST",
        help="stages with which it may: numbers below PP, separated by commas; auto: all of them; none: it waits "
        "(default: auto)",
    )
    add(
        "--num-layers",
        type=int,
        metavar="L",
        help="layers of the model, of which each stage has whole ones (default: each has the same part of the model)",
    )


def shapes_given(args: argparse.Namespace, nodes_flag: str, nodes: int | None) -> dict[str, Any]:
    """``stages``, the pipeline stages of a group, ``shapes``, those of its smaller shapes, and the model's ``layers``,
    where they are given. Raises ConfigError.

    ``nodes`` is the value of ``nodes_flag``, without which they have no effect."""
    stages, text, layers = args.pipeline_model_parallel_size, args.spare_shapes, args.num_layers
    if stages is None:
        refuse_without(args, "--pipeline-model-parallel-size PP", "spare_shapes", "num_layers")
        return {}
    if nodes is None:
        refuse_without(args, f"{nodes_flag} G", "pipeline_model_parallel_size")
    if stages < 1:
        raise ConfigError(f"--pipeline-model-parallel-size is {stages}, but must be at least 1")
    if layers is not None and layers < stages:
        raise ConfigError(
            f"--num-layers {layers} is less than --pipeline-model-parallel-size {stages}; use fewer stages"
        )
    return {"stages": stages, "shapes": shapes_of(text or "auto", stages), "layers": layers}
