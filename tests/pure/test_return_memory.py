"""The memory of a return: the formulas, the parameters of known models, and what ``--spare-check`` says."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

from spare_megatron.config.byte_units import in_bytes
from spare_megatron.config.shape import JobShape
from spare_megatron.planning.memory import RankParameters
from spare_megatron.planning.return_memory import return_memory
from spare_megatron.planning.state_copies import host_sets
from spare_megatron.worker.return_forecast import optimizer_values, rank_parameters, return_lines
from tests.pure.flags_of_a_job import job_of, launched

PLAIN = {
    "multi_latent_attention": False,
    "group_query_attention": False,
    "attention_output_gate": False,
    "swiglu": True,
    "quick_geglu": False,
    "num_experts": None,
    "mtp_num_layers": None,
    "hybrid_layer_pattern": None,
    "moe_shared_expert_intermediate_size": None,
    "untie_embeddings_and_output_weights": True,
    "position_embedding_type": "rope",
    "moe_latent_size": None,
    "use_distributed_optimizer": False,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "moe_layer_freq": 1,
    "moe_ffn_hidden_size": None,
    "max_position_embeddings": 4096,
    "bf16": True,
    "fp16": False,
    "optimizer": "adam",
    "sgd_momentum": 0.9,
    "spare_reduce": "exact",
    "spare_max_group_restarts": 3,
    "spare_state_redundancy": None,
}
LLAMA = {"hidden_size": 4096, "num_layers": 32, "num_attention_heads": 32, "kv_channels": 128, "ffn_hidden_size": 11008}
GPT = {
    "hidden_size": 12288,
    "num_layers": 96,
    "num_attention_heads": 96,
    "kv_channels": 128,
    "ffn_hidden_size": 49152,
    "swiglu": False,
    "untie_embeddings_and_output_weights": False,
    "position_embedding_type": "learned_absolute",
    "max_position_embeddings": 2048,
}
MIXTRAL = {
    **LLAMA,
    "group_query_attention": True,
    "num_query_groups": 8,
    "num_experts": 8,
    "moe_ffn_hidden_size": 14336,
}
DEEPSEEK = {
    "hidden_size": 7168,
    "num_layers": 61,
    "num_attention_heads": 128,
    "kv_channels": 56,
    "ffn_hidden_size": 18432,
    "multi_latent_attention": True,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    "num_experts": 256,
    "moe_ffn_hidden_size": 2048,
    "moe_shared_expert_intermediate_size": 2048,
    "moe_layer_freq": [0] * 3 + [1] * 58,
}


def flags(*changes: dict[str, Any], **more: Any) -> Namespace:
    merged = dict(PLAIN)
    for one in changes:
        merged |= one
    return Namespace(**{**merged, **more})


def shape(groups: int = 4, **degrees: int) -> JobShape:
    return JobShape(num_groups=groups, micro_batch_size=1, global_batch_size=1024, **degrees)


@pytest.mark.parametrize(
    ("model", "vocabulary", "published"),
    [(LLAMA, 32_000, 6.74e9), (GPT, 51_200, 174.6e9), (MIXTRAL, 32_000, 46.7e9), (DEEPSEEK, 129_280, 671e9)],
)
def test_the_parameters_of_known_models(model: dict[str, Any], vocabulary: int, published: float) -> None:
    parts = rank_parameters(flags(model), shape(), vocabulary)
    assert sum(part.parameters for part in parts) == pytest.approx(published, rel=0.003)


def test_parallel_ranks_share_them() -> None:
    whole = rank_parameters(flags(LLAMA), shape(), 32_000)[0].parameters
    dense, experts = rank_parameters(flags(LLAMA), shape(tensor=8), 32_000)
    assert (dense.parameters, experts.parameters) == (whole / 8, 0.0)
    ends = rank_parameters(flags(LLAMA), shape(pipeline=8), 32_000)[0].parameters
    assert ends == (whole - 2 * 32_000 * 4096) / 8 + 32_000 * 4096
    uneven = flags(LLAMA, decoder_first_pipeline_num_layers=11)
    assert rank_parameters(uneven, shape(pipeline=4), 0)[0].parameters == pytest.approx(11 / 32 * (whole - 2.62144e8))
    split = flags(MIXTRAL, use_distributed_optimizer=True, expert_model_parallel_size=4)
    dense, experts = rank_parameters(split, shape(tensor=2, inner_data=4), 32_000)
    assert (dense.sharing, experts.sharing) == (4, 2)
    assert experts.parameters == 32 * 8 * 3 * 4096 * 14336 / 4


@pytest.mark.parametrize(
    ("sharing", "split", "half", "moments", "state"),
    [
        *((1, False, True, 2, 12), (1, False, False, 2, 12), (1, False, True, 1, 8), (1, False, False, 0, 4)),
        *((4, True, True, 2, 5), (4, True, False, 2, 6), (1, True, True, 2, 14), (1, True, False, 2, 12)),
    ],
)
def test_the_bytes_of_a_parameter(sharing: int, split: bool, half: bool, moments: int, state: float) -> None:
    part = RankParameters(1e6, sharing, split)
    assert part.state_bytes(half, moments) == state * 1e6
    results = {"exact": 4e6, "exact32": 4e6, "fp32": 4e6, "bf16": 2e6}
    assert {mode: part.result_bytes(mode) * sharing for mode in results} == results


def test_the_state_of_soap_has_squares_for_each_side_of_a_matrix() -> None:
    named = ("adam", "muon", "lion", "sgd", "ademamix")
    assert [optimizer_values(flags(LLAMA, optimizer=name), 1) for name in named] == [2, 2, 2, 1, 3]
    matrices = [(3 * 4096, 4096), (4096, 4096), (2 * 11008, 4096), (4096, 11008)]
    squares = sum(2 * (rows**2 + columns**2) for rows, columns in matrices)
    parameters = sum(rows * columns for rows, columns in matrices)
    assert optimizer_values(flags(LLAMA, optimizer="soap"), 1) == pytest.approx(2 + squares / parameters)
    parted = optimizer_values(flags(LLAMA, optimizer="soap"), 8)
    assert parted == pytest.approx(2 + 2 * 8 * (4 * 4096**2 + (3 * 512) ** 2 + 512**2 + 2752**2 + 1376**2) / parameters)


def test_what_a_return_takes() -> None:
    assert return_memory(12.0, 8.0, 1) is None
    alone = return_memory(12.0, 8.0, 2)
    assert alone is not None
    assert (alone.donors, alone.state_part, alone.results_part, alone.result, alone.learners) == (1, 12, 32, 8, 1)
    two = return_memory(12.0, 1.0, 9)
    assert two is not None
    assert (two.donors, two.state_part, two.results_part, two.result, two.learners) == (2, 6, 8, 1, 2), "16 results"


def test_the_lines_of_a_check() -> None:
    assert list(return_lines(flags(LLAMA), shape(tensor=8), 32_000)) == [
        "while a lost group comes back (about 8.42e+08 parameters on a rank):",
        "  5.05 GB of host memory on each rank of 2 groups for a copy of the state, and up to 10.1 GB for results, for "
        "each of at most 2 such groups at a time",
        "  3.37 GB of device memory more on each of its own ranks, for a result",
    ]
    assert list(return_lines(flags(LLAMA, spare_max_group_restarts=0), shape(), 32_000)) == []
    assert list(return_lines(flags(LLAMA), shape(groups=1), 32_000)) == []


def test_where_groups_keep_some_state_shards_the_time_until_a_last_copy_is_lost_is_stated() -> None:
    """A loss of one of 4 groups, each after m = 49152 h / 8 GPUs, is followed with the chance 2 D / (N - 1) w / m by
    that of the other host of a shard within w: heartbeats stop, and 2 + 12 r / N bytes a parameter are gathered."""
    of = flags(LLAMA, spare_state_redundancy=2)
    line, saved = return_lines(of, shape(tensor=8, groups=4), 32_000)
    parameters = rank_parameters(of, shape(tensor=8, groups=4), 32_000)[0].parameters
    again_s = 5 + (2 + 12 * 2 / 4) * parameters / 2**30
    days = (49_152 / 8 * 3600) ** 2 / 2 / host_sets(4, 2) / again_s / 86400
    assert f"each made good in {again_s:.3g} s (at 1.07 GB per second and GPU): 2 copies: {days:.3g} days, 3 co" in line
    assert saved == f"while a checkpoint is read or made: about {in_bytes(12 * parameters)} of host memory on each rank"


def test_a_check_has_them(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        job_of("--spare-check --bf16", launched(2))
    text = capsys.readouterr().out
    assert "while a lost group comes back (about 2.65e+05 parameters on a rank):\n" in text
    assert " of host memory on each rank of 1 group for a copy of the state, and up to " in text
