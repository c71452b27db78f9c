"""Hugging Face directories that are not what they seem: each is converted right, or refused in one sentence with exit
code 2, and leaves nothing behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from spare_megatron.cli import convert
from tests.megatron.hugging_face_models import MODELS, YARN, add_predictors, run
from tests.megatron.refused_folders import FILE, Capture, configured, parts, refused, returned, same, store, weights

transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]


# ---------------------------------------------------------------- more files than the model's


def test_the_index_decides_which_files_count(model: Callable[[str], Path]) -> None:
    folder = model("llama")
    tensors = parts(folder)
    other = {name: one + 1.0 for name, one in tensors.items()}
    store(folder, other, "model_ema.safetensors")
    store(folder, other, "model-00003-of-00003.safetensors")
    assert same(returned(folder), tensors)
    theirs = transformers.LlamaForCausalLM.from_pretrained(folder).state_dict()
    assert same(dict(theirs), tensors)


def test_without_an_index_it_is_the_one_file_of_that_name(model: Callable[[str], Path]) -> None:
    folder = model("llama")
    tensors = weights(folder)
    store(folder, {name: one + 1.0 for name, one in tensors.items()}, "older.safetensors")
    assert same(returned(folder), tensors)


def test_files_of_which_nothing_says_what_the_model_is(model: Callable[[str], Path], capsys: Capture) -> None:
    folder = model("llama")
    tensors = parts(folder)
    (folder / f"{FILE}.index.json").rename(folder / "index")
    refused(folder, capsys, "model-00001-of-00002.safetensors", "fetch the index")
    (folder / "index").rename(folder / f"{FILE}.index.json")
    store(folder, tensors)
    refused(folder, capsys, "there are two models")


def test_a_name_in_two_files(model: Callable[[str], Path], capsys: Capture) -> None:
    folder = model("llama")
    parts(folder)
    twice = dict(safetensors_torch.load_file(folder / "model-00002-of-00002.safetensors"))
    twice["lm_head.weight"] = torch.ones(3)
    twice["model.norm.weight"] = torch.ones(64)
    store(folder, twice, "model-00002-of-00002.safetensors")
    refused(folder, capsys, "both have", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[]", "not an object"),
        ("{", "cannot be read"),
        ('{"weight_map": {}}', "no weight_map"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "is not a file's name"),
        ('{"weight_map": {"a": 3}}', "is not a file's name"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "has no gone.safetensors"),
        ('{"weight_map": {"a": "model.safetensors"}}', "model.safetensors has a, but it has not"),
    ],
)
def test_an_index_that_is_wrong(text: str, sentence: str, model: Callable[[str], Path], capsys: Capture) -> None:
    folder = model("llama")
    (folder / f"{FILE}.index.json").write_text(text)
    if "gone" in text:
        (folder / FILE).unlink()
    refused(folder, capsys, sentence)


def test_an_index_that_names_the_other_file(model: Callable[[str], Path], capsys: Capture) -> None:
    folder = model("llama")
    parts(folder)
    path = folder / f"{FILE}.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["lm_head.weight"] = next(
        name for name in set(index["weight_map"].values()) if name != index["weight_map"]["lm_head.weight"]
    )
    path.write_text(json.dumps(index))
    refused(folder, capsys, "has lm_head.weight, but it has not")


# ---------------------------------------------------------------- tensors that nobody reads


def test_an_output_layer_of_its_own_under_tied_embeddings(model: Callable[[str], Path], capsys: Capture) -> None:
    folder = model("llama-tied")
    tensors = weights(folder)
    words = tensors["model.embed_tokens.weight"]
    store(folder, {**tensors, "lm_head.weight": words + 1.0})
    refused(folder, capsys, "lm_head.weight", "tie_word_embeddings", "set it to false")
    store(folder, {**tensors, "lm_head.weight": words.clone()})  # a copy of the same is no other layer
    assert same(returned(folder), tensors)


def test_an_output_layer_is_kept_when_the_config_says_so(model: Callable[[str], Path]) -> None:
    folder = model("llama-tied")
    tensors = {**weights(folder)}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1.0
    store(folder, tensors)
    configured(folder, tie_word_embeddings=False)
    assert same(returned(folder), tensors)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.bool])
def test_quantized_weights(dtype: torch.dtype, model: Callable[[str], Path], capsys: Capture) -> None:
    folder = model("llama")
    tensors, name = weights(folder), "model.layers.0.mlp.up_proj.weight"
    scale = tensors[name].abs().max() / 127
    store(folder, {**tensors, name: (tensors[name] / scale).round().to(dtype), f"{name}_scale": scale.reshape(1)})
    refused(folder, capsys, name, str(dtype).removeprefix("torch."), "fetch the model in bf16")


def test_quantized_weights_of_a_type_of_8_bits(model: Callable[[str], Path], capsys: Capture) -> None:
    folder = model("llama")
    tensors, name = weights(folder), "model.layers.0.mlp.up_proj.weight"
    store(folder, {**tensors, name: tensors[name].to(torch.float8_e4m3fn)})
    refused(folder, capsys, name, "F8_E4M3", "is not converted")


def test_a_quantization_config(model: Callable[[str], Path], capsys: Capture) -> None:
    folder = model("llama")
    configured(folder, quantization_config={"quant_method": "gptq", "bits": 4})
    error = refused(folder, capsys, "quantization_config", "gptq", "bf16")
    assert "cannot be read" not in error


@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        ("llama", "model.layers.0.self_attn.q_proj.bias"),
        ("llama", "model.layers.0.mlp.up_proj.weight_scale"),
        ("llama", "model.layers.2.input_layernorm.weight"),  # of a layer more than the config has
        ("llama", "score.weight"),
        ("qwen2", "model.layers.1.self_attn.o_proj.bias"),
        ("qwen3", "model.layers.1.self_attn.k_proj.bias"),
        ("mixtral", "model.layers.1.block_sparse_moe.gate.bias"),
        ("qwen3-moe", "model.layers.1.mlp.gate.weight"),  # of a layer without experts
        ("deepseek-v2", "model.layers.1.mlp.gate.e_score_correction_bias"),
        ("deepseek-v3", "model.layers.1.mlp.shared_experts.up_proj.bias"),
        ("glm4-moe", "model.layers.0.self_attn.o_proj.bias"),
        ("gpt-oss", "model.layers.1.mlp.experts.down_proj_blocks"),
        ("gpt2", "transformer.h.0.crossattention.c_attn.weight"),
        ("gpt2", "wte.weight"),
    ],
)
def test_a_tensor_that_nobody_reads(kind: str, extra: str, model: Callable[[str], Path], capsys: Capture) -> None:
    folder = model(kind)
    store(folder, {**weights(folder), extra: torch.ones(64)})
    refused(folder, capsys, extra)


def test_predictors_with_embeddings_of_their_own(model: Callable[[str], Path], capsys: Capture) -> None:
    folder = model("deepseek-v3")
    add_predictors(folder, 1)
    tensors, name = weights(folder), "model.layers.2.embed_tokens.weight"
    store(folder, {**tensors, name: tensors[name] + 1.0})
    refused(folder, capsys, f"{name} differs from model.embed_tokens.weight")
    store(folder, {key: one for key, one in tensors.items() if key != name})
    refused(folder, capsys, f"no tensor {name}")
    configured(folder, num_nextn_predict_layers=0)
    refused(folder, capsys, "model.layers.2.eh_proj.weight", "which the model of its config.json has not")


def test_buffers_that_old_versions_stored_are_no_weights(model: Callable[[str], Path]) -> None:
    folder = model("gpt2")
    tensors = weights(folder)
    mask = torch.ones(64, 64, dtype=torch.bool).tril().view(1, 1, 64, 64)
    store(folder, {**tensors, "transformer.h.0.attn.bias": mask, "h.1.attn.masked_bias": torch.tensor(-1e4)})
    assert same(returned(folder), tensors)


def test_shapes_are_those_of_the_config(model: Callable[[str], Path], capsys: Capture) -> None:
    """Too few rows of the vocabulary were filled up with copies of the last one."""
    folder = model("llama")
    configured(folder, vocab_size=101)
    refused(folder, capsys, "model.embed_tokens.weight", "100x64", "101x64")
    configured(folder, vocab_size=100, intermediate_size=48)
    refused(folder, capsys, "96x64", "48x64")


def test_parts_of_one_tensor_may_have_several_types(model: Callable[[str], Path]) -> None:
    folder = model("llama")
    tensors = weights(folder)
    mixed = {name: one.to(torch.float16 if "k_proj" in name or "up_proj" in name else torch.bfloat16).clone()
             for name, one in tensors.items()}  # fmt: skip
    store(folder, mixed)
    found = returned(folder)
    assert found.keys() == mixed.keys()
    assert all(torch.equal(found[name].double(), mixed[name].double()) for name in mixed)


def test_layers_may_have_several_types(model: Callable[[str], Path]) -> None:
    """They are stored as one tensor, of which all had the type of the first layer."""
    folder = model("llama")
    tensors = weights(folder)
    mixed = {name: one.to(torch.bfloat16) if "layers.0." in name else one for name, one in tensors.items()}
    store(folder, mixed)
    found = returned(folder)
    assert all(torch.equal(found[name].double(), mixed[name].double()) for name in tensors)


def test_weights_of_megatron_that_nobody_reads(model: Callable[[str], Path], capsys: Capture) -> None:
    """The same holds the other way round: args that know less than the files."""
    from argparse import Namespace

    folder = model("qwen2")
    top = folder.parent
    run(folder, top / "legacy", "hf", "legacy")
    path = top / "legacy" / "iter_0000001" / "mp_rank_00" / "model_optim_rng.pt"
    state = torch.load(path, weights_only=False)
    state["args"] = Namespace(**{**vars(state["args"]), "add_qkv_bias": False})
    torch.save(state, path)
    words = ["--model-type", "GPT", "--load-dir", str(top / "legacy"), "--save-dir", str(top / "x"), "--saver"]
    assert convert.main([*words, "hf"]) == 2
    assert "decoder.layers.0.self_attention.linear_qkv.bias" in capsys.readouterr().err
    run(folder, top / "core", "hf", "core")
    directory = top / "core" / "iter_0000001"
    (directory / "spare_manifest.json").unlink()
    common = torch.load(directory / "common.pt", weights_only=False)
    common["args"] = Namespace(**{**vars(common["args"]), "add_qkv_bias": False})
    torch.save(common, directory / "common.pt")
    words[3] = str(top / "core")
    assert convert.main([*words, "hf"]) == 2
    assert "decoder.layers.self_attention.linear_qkv.bias" in capsys.readouterr().err
    assert not (top / "x").exists()


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("layernorm_zero_centered_gamma", True, "layernorm_zero_centered_gamma True"),
        ("rotary_interleaved", True, "transformers has no such model"),
        ("window_size", (4, 0), "has no equivalent"),
        ("moe_latent_size", 8, "moe_latent_size 8, which is not converted"),
    ],
)
def test_what_no_config_of_transformers_says(
    name: str, value: Any, sentence: str, model: Callable[[str], Path], capsys: Capture
) -> None:
    """The weights would be those of another model there."""
    from argparse import Namespace

    folder = model("llama")
    run(folder, folder.parent / "core", "hf", "core")
    directory = folder.parent / "core" / "iter_0000001"
    (directory / "spare_manifest.json").unlink()
    common = torch.load(directory / "common.pt", weights_only=False)
    common["args"] = Namespace(**{**vars(common["args"]), name: value})
    torch.save(common, directory / "common.pt")
    words = ["--model-type", "GPT", "--saver", "hf", "--load-dir", str(folder.parent / "core"), "--save-dir"]
    capsys.readouterr()
    assert convert.main([*words, str(folder.parent / "x")]) == 2
    assert sentence in capsys.readouterr().err
    assert not (folder.parent / "x").exists()


# ---------------------------------------------------------------- the config


@pytest.mark.parametrize(
    ("kind", "values", "sentence"),
    [
        ("llama", {"hidden_size": "64"}, "hidden_size '64', but it must be a whole number"),
        ("llama", {"num_attention_heads": 0}, "num_attention_heads 0"),
        ("llama", {"num_hidden_layers": 10**9}, "weights of 2 layers, but its config.json says 1000000000"),
        ("llama", {"num_hidden_layers": 10**30}, "num_hidden_layers"),
        ("llama", {"num_attention_heads": 5, "head_dim": None}, "not divisible"),
        ("llama", {"num_key_value_heads": 3}, "not divisible by its num_key_value_heads 3"),
        ("llama", {"tie_word_embeddings": "yes"}, "must be true or false"),
        ("llama", {"rms_norm_eps": "1e-5"}, "rms_norm_eps"),
        ("llama", {"hidden_act": "gelu"}, "only 'silu' is"),
        ("llama", {"attention_bias": True}, "attention_bias True"),
        ("llama", {"rope_parameters": [1]}, "must be an object or null"),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ("llama", {"rope_parameters": {"rope_type": "linear"}}, "without its factor"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.5}}, "2.5"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "which differ"),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor None"),
        ("llama", {"rope_parameters": {"rope_theta": 10000.5}}, "whole numbers"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("llama", {"attention_dropout": 1.5}, "below 1"),
        ("llama", {"model_type": ["llama"]}, "model_type"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok 9"),
        ("mixtral", {"num_local_experts": 2}, "weights of 4 experts"),
        ("mixtral", {"num_experts_per_tok": 1}, "every expert has the weight 1"),
        ("mixtral", {"num_experts": 8}, "num_local_experts 4 and num_experts 8"),
        ("qwen3-moe", {"mlp_only_layers": 3}, "mlp_only_layers 3"),
        ("qwen3-moe", {"attention_bias": True}, "attention_bias True"),
        ("qwen3-moe", {"use_sliding_window": True}, "use_sliding_window True"),
        ("qwen3-moe", {"decoder_sparse_step": 0}, "decoder_sparse_step 0"),
        ("deepseek-v3", {"rms_norm_eps": 1e-5}, "rms_norm_eps 1e-05"),
        ("deepseek-v3", {"rope_interleave": False}, "rope_interleave False"),
        ("deepseek-v3", {"num_key_value_heads": 2}, "num_key_value_heads 2"),
        ("deepseek-v3", {"norm_topk_prob": False}, "norm_topk_prob False"),
        ("deepseek-v3", {"topk_group": 1, "n_group": 2}, "topk_group 1"),
        ("deepseek-v3", {"n_group": 3}, "n_group 3"),
        ("deepseek-v3", {"num_local_experts": 4}, "one field with two names"),
        ("deepseek-v3", {"scoring_func": "softmax"}, "scoring_func 'softmax'"),
        ("deepseek-v3", {"n_shared_experts": None}, "n_shared_experts None"),
        ("deepseek-v3", {"first_k_dense_replace": -1}, "first_k_dense_replace -1"),
        ("deepseek-v3", {"attention_bias": True}, "attention_bias True"),
        ("deepseek-v3", {"rope_parameters": {**YARN, "beta_fast": 16}}, "beta_fast 16"),
        ("deepseek-v3", {"rope_parameters": {**YARN, "mscale": None}}, "mscale_all_dim 0.9 without mscale"),
        ("deepseek-v3", {"rope_parameters": {**YARN, "original_max_position_embeddings": 64}}, "embeddings 64"),
        ("deepseek-v3", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "default and yarn are"),
        ("deepseek-v2", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc'"),
        ("deepseek-v2", {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 1}, "topk_group 1"),
        ("deepseek-v2", {"norm_topk_prob": True}, "norm_topk_prob True"),
        ("deepseek-v2", {"routed_scaling_factor": 0}, "routed_scaling_factor 0"),
        ("glm4-moe", {"rope_parameters": {"partial_rotary_factor": 0.3}}, "gives heads of 9 channels"),
        ("glm4-moe", {"partial_rotary_factor": 0.25}, "which differ"),
        ("gpt-oss", {"swiglu_alpha": 1.5}, "swiglu_alpha 1.5"),
        ("gpt-oss", {"attention_bias": False}, "attention_bias False"),
        ("gpt-oss", {"sliding_window": None}, "sliding_window None"),
        ("gpt-oss", {"layer_types": ["sliding_attention"]}, "layer_types ['sliding_attention']"),
        ("gpt-oss", {"num_local_experts": 5}, "it has 5x64"),
        ("gpt-oss", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "original_max_position_embeddings None"),
        ("gpt-oss", {"rope_parameters": {**YARN, "mscale": 0.5}}, "mscale 0.5"),
        ("gpt2", {"activation_function": "relu"}, "relu"),
        ("gpt2", {"n_head": 7}, "not divisible"),
    ],
)
def test_a_config_that_is_wrong(
    kind: str, values: dict[str, Any], sentence: str, model: Callable[[str], Path], capsys: Capture
) -> None:
    folder = model(kind)
    configured(folder, **values)
    assert "cannot be read" not in refused(folder, capsys, sentence)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("gemma3_text", ("rope_local_base_freq", "no norm after attention")),
        ("gemma3", ("text_config", "rope_local_base_freq")),
        ("qwen3_next", ("layer_types", "linear_attention", "transformer-engine")),
        ("phi3", ("phi3", "qwen3_moe")),
    ],
)
def test_a_kind_that_megatron_core_has_not(
    kind: str, fields: tuple[str, ...], model: Callable[[str], Path], capsys: Capture
) -> None:
    folder = model("llama")
    configured(folder, model_type=kind)
    refused(folder, capsys, *fields)


@pytest.mark.parametrize("text", ["", "[1]", "null", "{", "[" * 100_000, '{"model_type": "llama"}', "\xff"])
def test_a_file_that_is_no_config(text: str, model: Callable[[str], Path], capsys: Capture) -> None:
    folder = model("llama")
    (folder / "config.json").write_bytes(text.encode("latin1"))
    refused(folder, capsys, "config.json")


WITH_DEFAULTS = (
    *("gpt2", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3-moe", "deepseek-v2", "deepseek-v3", "glm4-moe"),
    "gpt-oss",
)


@pytest.mark.parametrize("kind", WITH_DEFAULTS)
def test_values_that_a_config_leaves_out_are_those_of_transformers(kind: str) -> None:
    """Of its class for this kind: what a Mixtral leaves out is not what a Llama leaves out."""
    from spare_megatron.checkpoint.convert.hf_config import shape_of_config

    name = "Mistral" if kind == "mistral" else MODELS[kind][0]
    given = {"deepseek-v2": {"num_experts_per_tok": 6}, "glm4-moe": {"head_dim": 128}}.get(kind, {})
    whole = getattr(transformers, f"{name}Config")(**given).to_dict()
    if kind == "mistral":
        whole["sliding_window"] = whole["max_position_embeddings"]
    expected = shape_of_config(whole)
    needed = ("sliding_window",) if kind == "mistral" else tuple(given)
    refusals, taken = [], 0
    for field in whole.keys() - {"model_type", *needed}:
        short = {key: value for key, value in whole.items() if key != field}
        try:
            found = shape_of_config(short)
        except ValueError as error:
            refusals.append(str(error))
            continue
        assert found == expected, field
        taken += 1
    assert all("has no" in refusal for refusal in refusals)
    assert taken > 10
