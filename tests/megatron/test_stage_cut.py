"""The layers of each stage are those that megatron-core gives it, in the home shape and in smaller ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.rows import smaller
from spare_megatron.config.stage_cut import StageCut
from spare_megatron.megatron_adapter.model.home_rows import check_home
from spare_megatron.megatron_adapter.shims import install_cpu_shims
from spare_megatron.worker import megatron_job
from tests.pure.flags_of_a_job import job_of

CUTS = [
    StageCut(4, 2),
    StageCut(12, 6),
    StageCut(8, 3, first=1, last=1),
    StageCut(13, 5, counts_embedding=True, counts_loss=True),
    StageCut(16, 4, 2),
    StageCut(24, 4, 3),
    StageCut(6, 4, first=1, last=1),
    StageCut(9, 4, first=3),
    StageCut(9, 4, last=3),
    StageCut(3, 2, first=1, last=2),
    StageCut(20, 4, 2, first=4, last=4),
    StageCut(7, 4, counts_embedding=True),
    StageCut(7, 4, counts_loss=True),
    StageCut(14, 4, 2, counts_embedding=True, counts_loss=True),
    StageCut(4, 4, layout=("E", "tt", "t", "tL")),
    StageCut(9, 4, 2, layout=("Et", "tt", "", "t", "t", "tt", "t", "tL")),
]


def cores(cut: StageCut) -> list[tuple[int, int]]:
    """The first layer of each chunk and their number, by megatron-core, in the order of the model."""
    install_cpu_shims()
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    if cut.layout:
        layout = PipelineParallelLayerLayout(cut.fields()["pipeline_model_parallel_layout"], cut.stages)
        sizes = [
            sum(one.name == "decoder" for one in rank[c]) for c in range(cut.chunks or 1) for rank in layout.layout
        ]
        return [(sum(sizes[:at]), size) for at, size in enumerate(sizes)]
    config = SimpleNamespace(num_layers=cut.layers, pipeline_model_parallel_size=cut.stages, **cut.fields())
    places = [(None if cut.chunks is None else c, s) for c in range(cut.chunks or 1) for s in range(cut.stages)]
    return [(get_transformer_layer_offset(config, c, s), get_num_layers_to_build(config, c, s)) for c, s in places]


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_a_shape_has_the_layers_that_megatron_core_builds(cut: StageCut) -> None:
    for stages in (cut.stages, *smaller(cut.stages, cut.whole_stages())):
        there = cut.with_stages(stages)
        sizes = there.sizes()
        assert sum(sizes) == cut.layers
        assert cores(there) == [(sum(sizes[:at]), size) for at, size in enumerate(sizes)]


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_a_chunk_of_home_is_in_one_chunk_on_the_rank_of_its_row(cut: StageCut) -> None:
    for stages in smaller(cut.stages, "stages stay whole"):
        each = cut.stages // stages
        found: dict[tuple[int, int], set[tuple[int, int]]] = {}
        for home, there in zip(cut.places(), cut.with_stages(stages).places(), strict=True):
            found.setdefault((home.stage, home.chunk), set()).add((there.stage, there.chunk))
        for (stage, chunk), places in found.items():
            assert places == {(stage // each, chunk if stages > 1 else 0)}


def stage_of(*names: str) -> list[Any]:
    """A chunk of a home stage with tensors of these names."""
    chunk = torch.nn.Module()
    chunk.module = torch.nn.Module()
    for name in names:
        parent = chunk.module
        *path, last = name.split(".")
        for part in path:
            if not hasattr(parent, part):
                parent.add_module(part, torch.nn.Module())
            parent = parent.get_submodule(part)
        parent.register_parameter(last, torch.nn.Parameter(torch.zeros(2)))
    for number, layer in chunk.module.get_submodule("decoder.layers").named_children():
        layer.layer_number = int(number) + 3  # the second stage of two, with two layers each
    return [chunk]


LAYER = "decoder.layers.0.mlp.weight"


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        ((LAYER, "pooler.weight"), "which stage has pooler.weight is not known; only GPT models of decoder layers"),
        ((LAYER, "embedding.weight"), "stage 1 has embedding.weight, which belongs to stage 0"),
        ((LAYER, "decoder.layers.2.mlp.weight"), "which stage has decoder.layers.4.mlp.weight is not known"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused(names: tuple[str, ...], reason: str) -> None:
    config = SimpleNamespace(mtp_num_layers=None)
    check_home(stage_of(LAYER, "decoder.final_layernorm.weight", "output_layer.weight"), config, StageCut(4, 2), 1)
    with pytest.raises(ConfigError, match=f"^the groups of this job can run in their home shape only: {reason}"):
        check_home(stage_of(*names), config, StageCut(4, 2), 1)


def test_a_users_choice_of_embedding_ranks_is_refused() -> None:
    job, _ = job_of("--pipeline-model-parallel-size 2 --spare-shapes auto --spare-max-group-restarts 3")
    user: Any = SimpleNamespace(get_embedding_ranks=lambda ranks: ranks)
    loaded: Any = None
    with pytest.raises(ConfigError, match="--spare-shapes auto: get_embedding_ranks chooses among the stages"):
        megatron_job._check_cut(job, user, loaded)
