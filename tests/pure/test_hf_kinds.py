"""Which kind of Hugging Face model a shape is: what no kind has is refused, and never left out silently."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from spare_megatron.checkpoint.convert.hf_config import kind_of
from spare_megatron.checkpoint.convert.hf_latents import latent_fields
from spare_megatron.checkpoint.convert.model import ModelShape
from spare_megatron.config.errors import ConfigError

GPT = ModelShape(
    num_layers=2,
    hidden_size=64,
    num_attention_heads=4,
    num_query_groups=4,
    kv_channels=16,
    ffn_hidden_size=256,
    max_position_embeddings=32,
    padded_vocab_size=128,
)
LLAMA = replace(
    GPT,
    normalization="RMSNorm",
    position_embedding_type="rope",
    swiglu=True,
    add_bias_linear=False,
    add_qkv_bias=False,
)
OTHERS: dict[str, Any] = {
    "softmax_type": "off-by-one",
    "window_size": (4, 0),
    "quick_geglu": True,
    "activation_func_clamp_value": 7.0,
    "glu_linear_offset": 1.0,
}


def test_the_usual_kinds() -> None:
    assert (kind_of(GPT), kind_of(LLAMA)) == ("gpt2", "llama")
    assert kind_of(replace(LLAMA, add_qkv_bias=True)) == "qwen2"
    assert kind_of(replace(LLAMA, qk_layernorm=True)) == "qwen3"


@pytest.mark.parametrize("field", OTHERS)
@pytest.mark.parametrize("shape", [GPT, LLAMA], ids=["gpt2", "llama"])
def test_what_neither_kind_has_is_refused(shape: ModelShape, field: str) -> None:
    with pytest.raises(ConfigError, match="has no equivalent among transformers'"):
        kind_of(replace(shape, **{field: OTHERS[field]}))


def test_norms_of_latents_have_one_epsilon_in_transformers() -> None:
    shape = replace(LLAMA, multi_latent_attention=True, kv_lora_rank=16, norm_epsilon=1e-6)
    assert latent_fields(shape)["kv_lora_rank"] == 16
    with pytest.raises(ConfigError, match=r"--norm-epsilon 1e-05, .*; train with --norm-epsilon 1e-06"):
        latent_fields(replace(shape, norm_epsilon=1e-5))
