"""How a group that has too few devices for its home shape keeps several parts of the model on one rank. Pure.

The *home* shape of a job is the TP x PP x CP x D of its flags. A group may run with fewer *stages*. A *row* is what all
shapes that the job allows keep together: the layers, the embedding and the head that are on one stage at home and on
one stage in every other shape, at one place within the stage. Where each number of stages divides that of home, a row
is what one rank has at home, and has that rank's position as its number. With other numbers, stages are cut inside
those of home, and a home rank has several rows too. Everything that groups exchange or compare is by row: sums,
digests, state.

Promises: rows depend on the flags of the job alone, not on which shapes its groups have now; each row is on exactly one
rank of a group; a rank reduces its rows in ascending order, which is one order for all ranks of the job, so no ranks
wait for each other in a circle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.shape import JobShape
from spare_megatron.config.stage_cut import StageCut


def smaller(pipeline: int, only: str = "") -> list[int]:
    """The numbers of stages with which a group can run where home has ``pipeline``, the largest first. ``only`` is a
    reason for which stages of home must stay whole; empty: there is none."""
    return [stages for stages in range(pipeline - 1, 0, -1) if not (only and pipeline % stages)]


def check_stages(pipeline: int, stages: int, source: str, only: str = "") -> None:
    """Raises ConfigError where no group of the job can run with so many stages; ``source`` names where they stand."""
    known = smaller(pipeline, only)
    if stages in known:
        return
    fix = f"use {', '.join(map(str, known))}" if known else "with one stage there is no smaller shape"
    if stages in smaller(pipeline):
        raise ConfigError(
            f"{source} has {stages} pipeline stages, but {only}, so each stage of a smaller shape has equally many of "
            f"the {pipeline} of --pipeline-model-parallel-size: {fix}"
        )
    raise ConfigError(
        f"{source} has {stages} pipeline stages, but a smaller shape has at least 1 and fewer than the {pipeline} of "
        f"--pipeline-model-parallel-size: {fix}"
    )


def shapes_of(text: str, pipeline: int, only: str = "", only_auto: str = "") -> tuple[int, ...]:
    """The smaller shapes that ``--spare-shapes`` allows, as numbers of stages, the largest first. Raises
    ConfigError.

    ``only`` is as in :func:`smaller`; ``only_auto`` is such a reason that holds unless a number is asked for."""
    if text == "none":
        return ()
    if text == "auto":
        return tuple(smaller(pipeline, only or only_auto))
    parts = text.split(",")
    if not all(part.isdecimal() for part in parts):
        raise ConfigError(
            f"--spare-shapes {text!r} is no list of numbers of pipeline stages; use none, auto, or numbers such as "
            f"{','.join(map(str, smaller(pipeline, only))) or '1'}"
        )
    for part in parts:
        check_stages(pipeline, int(part), f"--spare-shapes {text}", only)
    return tuple(sorted({int(part) for part in parts}, reverse=True))


def ranks_with(group_size: int, pipeline: int, stages: int) -> int:
    """The ranks of a group with so many stages, where home has ``group_size`` in ``pipeline`` of them; 0 for home."""
    return group_size // pipeline * (stages or pipeline)


def shape_of(home: JobShape, stages: int) -> JobShape:
    """The degrees of parallelism of a group with so many stages; 0 for home."""
    return replace(home, pipeline=stages or home.pipeline)


@dataclass(frozen=True)
class RowCut:
    """The division of a model into the rows of the ranks at one place within their stages. They are numbered in the
    order of the model."""

    home: StageCut
    shapes: tuple[int, ...] = ()
    """The numbers of stages of the smaller shapes."""

    @cached_property
    def _cells(self) -> list[tuple[int, ...]]:
        """Of the embedding, each layer and the head: its stage at home, then in each shape that cuts home's stages."""
        cuts = [self.home, *(self.home.with_stages(one) for one in self.shapes if self.home.stages % one)]
        layers = zip(*([place.stage for place in cut.places()] for cut in cuts), strict=True)
        return [(0,) * len(cuts), *layers, tuple(cut.stages - 1 for cut in cuts)]

    @cached_property
    def _rows(self) -> list[tuple[int, ...]]:
        """What :attr:`_cells` has of the cells of each row."""
        if len(self._cells[0]) == 1:  # a stage may have no cell
            return [(stage,) for stage in range(self.home.stages)]
        return sorted(set(self._cells))

    @property
    def number(self) -> int:
        """Of rows."""
        return len(self._rows)

    @cached_property
    def of_layers(self) -> Sequence[int]:
        """The row of each layer."""
        numbers = {one: number for number, one in enumerate(self._rows)}
        return [numbers[cell] for cell in self._cells[1:-1]]

    @property
    def is_home(self) -> bool:
        """Whether each row is a whole stage of home."""
        return len(self._cells[0]) == 1

    def of_stage(self, stages: int, stage: int) -> list[int]:
        """The rows of a stage in the shape with so many stages, ascending. It is one of the shapes, or home's."""
        if not self.home.stages % stages:
            each = self.home.stages // stages
            return [row for row, cell in enumerate(self._rows) if cell[0] // each == stage]
        at = 1 + [one for one in self.shapes if self.home.stages % one].index(stages)
        return [row for row, cell in enumerate(self._rows) if cell[at] == stage]


def rows_of(home: JobShape, cut: RowCut, stages: int, position: int) -> tuple[int, ...]:
    """The rows of the rank at ``position`` of a group with so many stages, ascending. The pipeline is the outermost
    dimension of a group's ranks."""
    inner = home.group_size // home.pipeline
    stage, at = divmod(position, inner)
    return tuple(row * inner + at for row in cut.of_stage(stages, stage))
