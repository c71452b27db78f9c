"""Operations of a step, against the formula of Narayanan et al. 2021 (arXiv:2104.04473) with causal attention."""

from __future__ import annotations

import pytest

from spare_megatron.worker.flops import flops_per_step
from tests.pure.flags_of_a_job import job_of


def flops(extra: str) -> float:
    _, args = job_of(extra + " --padded-vocab-size 1024")
    return flops_per_step(args)


@pytest.mark.parametrize(("layers", "hidden", "length", "batch"), [(4, 64, 64, 8), (8, 128, 64, 3)])
def test_the_published_formula(layers: int, hidden: int, length: int, batch: int) -> None:
    """72 B s l h^2 (1 + s / 12h + V / 12lh): half of the paper's s / 6h, because the mask is causal."""
    square = 1 + length / (12 * hidden) + 1024 / (12 * layers * hidden)
    want = 72 * batch * length * layers * hidden**2 * square
    assert flops(f"--num-layers {layers} --hidden-size {hidden} --global-batch-size {batch}") == pytest.approx(want)


def test_experts_count_as_many_as_a_token_visits() -> None:
    dense = flops("--disable-bias-linear")
    assert flops("--disable-bias-linear --num-experts 8 --moe-router-topk 1 --moe-router-pre-softmax") == dense
    two = flops("--disable-bias-linear --num-experts 8 --moe-router-topk 2 --moe-layer-freq 2")
    tokens = 6 * 64  # one sample of 64 tokens, three passes, two operations
    assert two - dense == tokens * 2 * 64 * 256 * 2


def test_multi_token_prediction_is_a_layer_a_projection_and_an_output() -> None:
    rope = "--position-embedding-type rope --num-layers 4"
    more = flops(f"{rope} --mtp-num-layers 2") - flops(rope)
    layer = flops(f"{rope[:-1]}5") - flops(rope)
    assert more == 2 * (layer + 6 * 64 * 64 * (3 + 2 * 64 + 1024))
    experts = "--disable-bias-linear --num-experts 8 --moe-router-topk 2 --moe-layer-freq "
    last, first = (flops(f"{rope} --mtp-num-layers 1 {experts}{kinds}") for kinds in ("[0,0,0,1]", "[1,0,0,0]"))
    assert last - first == 6 * 64 * 2 * 64 * 256


def test_gated_activations_and_query_groups() -> None:
    tokens = 6 * 64
    assert flops("--swiglu --ffn-hidden-size 256") - flops("") == tokens * 4 * 64 * 256
    assert flops("") - flops("--group-query-attention --num-query-groups 1") == tokens * 4 * 64 * 2 * 48
