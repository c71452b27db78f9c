"""How the layers of a model are divided over the stages of a pipeline, in the home shape of a job and in smaller ones.

A stage has one or several *chunks* (virtual stages). Chunk c of stage s has the layers that follow those of chunk c of
stage s - 1; chunk c of the first stage follows chunk c - 1 of the last. A smaller shape whose number of stages divides
that of home keeps the chunks: chunk c of a stage has what k neighbouring stages of home have in theirs. With a single
stage all chunks are one. Any other smaller shape is cut at layers, into stages as equal as possible, the larger ones
first; home then has one chunk on each stage.

Promises: all that a chunk of home has is in one chunk of every smaller shape whose stages divide home's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple


class LayerPlace(NamedTuple):
    """Where a layer is."""

    stage: int
    chunk: int
    number: int
    """In the chunk, from 0."""


@dataclass(frozen=True)
class StageCut:
    """The division of one model."""

    layers: int
    stages: int
    chunks: int | None = None
    """Of each stage; None: one, which is not numbered."""
    first: int | None = None
    """Layers of the first stage, where it has a number of its own."""
    last: int | None = None
    counts_embedding: bool = False
    """Whether the embedding counts as a layer of the first chunk."""
    counts_loss: bool = False
    layout: tuple[str, ...] = ()
    """What each chunk has, in the order of the model, where all is written out: a layer is a 't'."""

    def sizes(self) -> list[int]:
        """The number of layers of each chunk, in the order of the model."""
        if self.layout:
            return [one.count("t") for one in self.layout]
        chunks = self.chunks or 1
        if self.first is None and self.last is None:
            ends = self.counts_embedding, self.counts_loss
            number = self.stages * chunks
            sizes = [(self.layers + sum(ends)) // number] * number
            sizes[0] -= ends[0]
            sizes[-1] -= ends[1]
            return sizes
        of_stages = [self._middle] * self.stages
        if self.first is not None:
            of_stages[0] = self.first
        if self.last is not None:
            of_stages[-1] = self.last
        return [layers // chunks for layers in of_stages] * chunks

    @property
    def _middle(self) -> int:
        """Layers of a stage that has no number of its own."""
        given = [one for one in (self.first, self.last) if one is not None]
        others = self.stages - len(given)
        return (self.layers - sum(given)) // others if others else 0

    def places(self) -> list[LayerPlace]:
        """The place of each layer of the model."""
        return [
            LayerPlace(index % self.stages, index // self.stages, number)
            for index, size in enumerate(self.sizes())
            for number in range(size)
        ]

    def whole_stages(self) -> str:
        """Why no smaller shape can cut these stages; empty where one can."""
        if self.chunks is not None:
            return "virtual pipeline stages cannot be cut"
        if self.layout:
            return "stages of --pipeline-model-parallel-layout cannot be cut"
        few = self.layers + self.counts_embedding + self.counts_loss < self.stages
        return f"{self.layers} layers are too few to cut stages" if few else ""

    def with_stages(self, stages: int) -> StageCut:
        """The division over fewer stages: equally many of these are one or, where that cannot be, the layers are
        divided anew, as evenly as possible."""
        each = self.stages // stages
        if stages == self.stages:
            return self
        if self.stages % stages:
            return self._cut_anew(stages)
        if stages == 1:
            return StageCut(self.layers, 1)
        implied = stages == 2 and self.first is not None  # megatron-core divides by the number of other stages
        layout = ("".join(self.layout[at : at + each]) for at in range(0, len(self.layout), each))
        more = (each - 1) * self._middle
        return replace(
            self,
            stages=stages,
            first=None if self.first is None else self.first + more,
            last=None if self.last is None or implied else self.last + more,
            layout=tuple(layout),
        )

    def _cut_anew(self, stages: int) -> StageCut:
        cells = "E" * self.counts_embedding + "t" * self.layers + "L" * self.counts_loss
        size, more = divmod(len(cells), stages)
        starts = [stage * size + min(stage, more) for stage in range(stages + 1)]
        parts = [cells[start:stop].strip("EL") for start, stop in pairwise(starts)]
        return StageCut(self.layers, stages, layout=("E" + parts[0], *parts[1:-1], parts[-1] + "L"))

    def fields(self) -> Mapping[str, Any]:
        """The fields of megatron-core's TransformerConfig that say this."""
        return {
            "virtual_pipeline_model_parallel_size": self.chunks,
            "num_layers_in_first_pipeline_stage": self.first,
            "num_layers_in_last_pipeline_stage": self.last,
            "account_for_embedding_in_pipeline_split": self.counts_embedding,
            "account_for_loss_in_pipeline_split": self.counts_loss,
            "pipeline_model_parallel_layout": "|".join(self.layout) or None,
        }
