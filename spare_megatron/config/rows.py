"""How a group that has too few devices for its home shape keeps several pipeline stages on one rank. Pure.

The *home* shape of a job is the TP x PP x CP x D of its flags. A group may run with fewer *stages*: with PP / k of
them, each has k neighbouring ones of home. A *row* is what one rank of a group in the home shape keeps of the model,
and has that rank's position as its number. So a group in the home shape has one row on each rank, and another group
keeps several whole rows on each. Everything that groups exchange or compare is by row: sums, digests, state.

Promises: each row is on exactly one rank of a group; a rank reduces its rows in ascending order, which is one order for
all ranks of the job, so no ranks wait for each other in a circle.
"""

from __future__ import annotations

from dataclasses import replace

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.shape import JobShape


def smaller(pipeline: int) -> list[int]:
    """The numbers of stages with which a group can run where home has ``pipeline``, the largest first."""
    return [stages for stages in range(pipeline - 1, 0, -1) if not pipeline % stages]


def check_stages(pipeline: int, stages: int, source: str) -> None:
    """Raises ConfigError where no group of the job can run with so many stages; ``source`` names where they stand."""
    known = smaller(pipeline)
    if stages not in known:
        fix = f"use {', '.join(map(str, known))}" if known else "with one stage there is no smaller shape"
        raise ConfigError(
            f"{source} has {stages} pipeline stages, but each stage of a smaller shape has equally many of the "
            f"{pipeline} of --pipeline-model-parallel-size: {fix}"
        )


def shapes_of(text: str, pipeline: int) -> tuple[int, ...]:
    """The smaller shapes that ``--spare-shapes`` allows, as numbers of stages, the largest first. Raises
    ConfigError."""
    if text == "none":
        return ()
    if text == "auto":
        return tuple(smaller(pipeline))
    parts = text.split(",")
    if not all(part.isdecimal() for part in parts):
        raise ConfigError(
            f"--spare-shapes {text!r} is no list of numbers of pipeline stages; use none, auto, or numbers such as "
            f"{','.join(map(str, smaller(pipeline))) or '1'}"
        )
    for part in parts:
        check_stages(pipeline, int(part), f"--spare-shapes {text}")
    return tuple(sorted({int(part) for part in parts}, reverse=True))


def ranks_with(group_size: int, pipeline: int, stages: int) -> int:
    """The ranks of a group with so many stages, where home has ``group_size`` in ``pipeline`` of them; 0 for home."""
    return group_size // pipeline * (stages or pipeline)


def shape_of(home: JobShape, stages: int) -> JobShape:
    """The degrees of parallelism of a group with so many stages; 0 for home."""
    return replace(home, pipeline=stages or home.pipeline)


def rows_of(home: JobShape, stages: int, position: int) -> tuple[int, ...]:
    """The rows of the rank at ``position`` of a group with so many stages, ascending. The pipeline is the outermost
    dimension of a group's ranks."""
    inner, each = home.group_size // home.pipeline, home.pipeline // stages
    stage, at = divmod(position, inner)
    return tuple((stage * each + n) * inner + at for n in range(each))
