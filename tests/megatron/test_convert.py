"""Conversion: the same logits as transformers', bit-equal round trips, the same digest under every layout."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from spare_megatron.checkpoint import folder
from spare_megatron.checkpoint.convert.conversion import open_source
from spare_megatron.checkpoint.convert.mp_rank import inner_name
from spare_megatron.checkpoint.convert.tensors import entries
from spare_megatron.checkpoint.files import entries_of
from spare_megatron.cli import convert
from spare_megatron.config.errors import ConfigError
from spare_megatron.megatron_adapter.checkpoint.manifest_version import MANIFEST
from tests.megatron.hugging_face_models import (
    EXPERT_KINDS,
    MODELS,
    NOT_LOCAL,
    SEED,
    VOCAB,
    add_predictors,
    flags_of,
    logits_of,
    make,
    run,
)

transformers = pytest.importorskip("transformers")

LOCAL = [kind for kind in MODELS if kind not in NOT_LOCAL]
pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]


OF_EACH_SORT = ("llama-tied", "qwen3-moe", "deepseek-v3")
"""Dense, experts, and latent attention with groups of experts: what is cut in a way of its own."""


def tensors(where: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for path in sorted(where.glob("*.safetensors")):
        found |= load_file(path)
    return found


def our_logits(save: Path, tokens: torch.Tensor) -> torch.Tensor:
    """Of the model that the written flags describe, whose tensors are split as megatron-core says."""

    def look(model: torch.nn.Module) -> None:
        theirs = {
            name.removeprefix("module."): one.partition_dim if getattr(one, "tensor_model_parallel", False) else None
            for name, one in model.named_parameters()
        }
        ours = {
            inner_name(entry, entry.layer, entry.expert, "local"): entry.axis
            for entry in entries(open_source(save, "core")[0].shape)
        }
        unmarked = [name for name in theirs if name.endswith("softmax_offset")]  # one for each head of a rank
        assert {name: (ours[name], axis) for name, axis in theirs.items() if ours[name] != axis} == dict.fromkeys(
            unmarked, (0, None)
        )

    return logits_of(flags_of(save), save / "iter_0000001", tokens, look=look)[..., :VOCAB]


@pytest.mark.parametrize("kind", LOCAL)
def test_logits_are_those_of_transformers_and_round_trips_are_equal(kind: str, tmp_path: Path) -> None:
    model = make(kind, tmp_path / "hf")
    run(tmp_path / "hf", tmp_path / "ours", "hf", "core")
    tokens = torch.randint(0, VOCAB, (2, 16), generator=torch.Generator().manual_seed(SEED))
    with torch.no_grad():
        theirs = model(tokens).logits
    assert (our_logits(tmp_path / "ours", tokens) - theirs).abs().max() < 1e-4
    sizes = ("--target-tensor-parallel-size", "2", "--target-pipeline-parallel-size", "2")
    experts = ("--target-expert-parallel-size", "2" if kind in EXPERT_KINDS else "1")
    run(tmp_path / "ours", tmp_path / "cut", "core", "legacy", *sizes, *experts)
    for name, origin in (("from-ours", "ours"), ("from-cut", "cut")):
        run(tmp_path / origin, tmp_path / name, "core", "hf")
        before, after = tensors(tmp_path / "hf"), tensors(tmp_path / name)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[one], after[one]) for one in before)
        assert json.loads((tmp_path / name / "config.json").read_text())["model_type"] == model.config.model_type
        assert (tmp_path / name / "tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize("kind", ["deepseek-v3", "glm4-moe"])
def test_layers_that_predict_more_tokens(kind: str, tmp_path: Path) -> None:
    """They go to megatron-core and back, and a job's model loads them; its losses of the next token are those of the
    model without them, as transformers has it."""
    model = make(kind, tmp_path / "hf", vocab_size=128)
    add_predictors(tmp_path / "hf", 2)
    run(tmp_path / "hf", tmp_path / "ours", "hf", "core")
    assert "--mtp-num-layers 2" in (tmp_path / "ours" / "model_flags.txt").read_text()
    tokens, labels = torch.randint(0, 128, (2, 2, 16), generator=torch.Generator().manual_seed(SEED))
    with torch.no_grad():
        theirs = torch.nn.functional.cross_entropy(model(tokens).logits.mT, labels, reduction="none")
    flags, ours = flags_of(tmp_path / "ours"), tmp_path / "ours" / "iter_0000001"
    assert (logits_of(flags, ours, tokens, labels=labels) - theirs).abs().max() < 1e-5
    sizes = ("--target-tensor-parallel-size", "2", "--target-pipeline-parallel-size", "2")
    run(tmp_path / "ours", tmp_path / "cut", "core", "legacy", *sizes, "--target-expert-parallel-size", "2")
    for name in ("ours", "cut"):
        run(tmp_path / name, tmp_path / f"from-{name}", "core", "hf")
        before, after = tensors(tmp_path / "hf"), tensors(tmp_path / f"from-{name}")
        assert before.keys() == after.keys()
        assert all(torch.equal(before[one], after[one]) for one in before)
        config = json.loads((tmp_path / f"from-{name}" / "config.json").read_text())
        assert config == json.loads((tmp_path / "hf" / "config.json").read_text())


def saved_by_a_job(directory: Path) -> None:
    """Give a checkpoint what the args of a job have and a conversion does not know: they are carried along."""
    common = torch.load(directory / "common.pt", weights_only=False)
    common["args"].expert_tensor_parallel_size = common["args"].tensor_model_parallel_size
    torch.save(common, directory / "common.pt")
    (directory / MANIFEST).unlink()
    folder.write_manifest(directory, entries_of(directory))


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in OF_EACH_SORT else pytest.mark.full) for kind in MODELS]
)
def test_one_digest_under_every_layout(kind: str, tmp_path: Path) -> None:
    from spare_megatron.megatron_adapter.checkpoint.digest import digest

    make(kind, tmp_path / "hf")
    run(tmp_path / "hf", tmp_path / "first", "hf", "core")
    saved_by_a_job(tmp_path / "first" / "iter_0000001")
    previous = tmp_path / "first"
    for number, (tensor, pipeline) in enumerate(((2, 2), (1, 1), (1, 4))):
        sizes = ("--target-tensor-parallel-size", str(tensor), "--target-pipeline-parallel-size", str(pipeline))
        run(previous, tmp_path / f"cut{number}", "core", "legacy", *sizes)
        run(tmp_path / f"cut{number}", tmp_path / f"whole{number}", "legacy", "core", *sizes)
        previous = tmp_path / f"cut{number}"
        assert digest(tmp_path / f"whole{number}" / "iter_0000001") == digest(tmp_path / "first" / "iter_0000001")


@pytest.mark.parametrize("kind", LOCAL)
def test_mp_rank_files_are_what_a_core_model_loads(kind: str, tmp_path: Path) -> None:
    """The names and shapes of the state of megatron-core's own (local) model, strictly."""
    from spare_megatron.megatron_adapter.model import world
    from spare_megatron.megatron_adapter.model.replica import build_replica
    from spare_megatron.worker.job_arguments import parse_job

    make(kind, tmp_path / "hf")
    run(tmp_path / "hf", tmp_path / "cut", "hf", "legacy", "--saver-transformer-impl", "local")
    words = shlex.split((tmp_path / "cut" / "model_flags.txt").read_text())
    rest = "--mock-data --tokenizer-type NullTokenizer --micro-batch-size 1 --train-iters 2 --lr 1e-3 --seq-length 16"
    job, _ = parse_job([*words, *rest.split(), "--vocab-size", str(VOCAB), "--transformer-impl", "local"])
    path = tmp_path / "cut" / "iter_0000001" / "mp_rank_00" / "model_optim_rng.pt"
    state = torch.load(path, weights_only=False)
    here = world.init_group_world(job.shape, 0, torch.distributed.HashStore(), timeout_s=60.0)
    try:
        module = build_replica(job.settings(128), here).chunks[0].module
        module.load_state_dict(state["model"], strict=True)
    finally:
        world.destroy()


@pytest.mark.parametrize("kind", MODELS)
def test_dropouts_are_those_of_the_config(kind: str) -> None:
    from spare_megatron.checkpoint.convert.hf_config import config_of_shape, shape_of_config

    name, values = MODELS[kind]
    own = {"attn_pdrop": 0.3, "resid_pdrop": 0.2} if kind == "gpt2" else {"attention_dropout": 0.3}
    config = getattr(transformers, f"{name}Config")(**{**values, **own}).to_dict()
    shape = shape_of_config(config)
    assert (shape.attention_dropout, shape.hidden_dropout) == (0.3, 0.2 if kind == "gpt2" else 0.0)
    written = config_of_shape(shape, config["model_type"], torch.float32)
    assert {key: written[key] for key in own} == own


PUBLISHED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "Qwen3-30B-A3B": (
        {"model_type": "qwen3_moe", "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128,
         "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48,
         "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32,
         "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
         "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
         "sliding_window": None, "use_sliding_window": False, "vocab_size": 151936},
        ("--num-experts 128", "--moe-ffn-hidden-size 768", "--qk-layernorm", "--rotary-base 1000000"),
    ),
    "DeepSeek-V2-Lite": (
        {"model_type": "deepseek_v2", "attention_bias": False, "first_k_dense_replace": 1, "hidden_size": 2048,
         "intermediate_size": 10944, "kv_lora_rank": 512, "max_position_embeddings": 163840,
         "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64,
         "n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 16, "num_experts_per_tok": 6,
         "num_hidden_layers": 27, "num_key_value_heads": 16, "q_lora_rank": None, "qk_nope_head_dim": 128,
         "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_theta": 10000, "routed_scaling_factor": 1.0,
         "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
                          "original_max_position_embeddings": 4096, "type": "yarn"},
         "scoring_func": "softmax", "topk_group": 1, "topk_method": "greedy", "v_head_dim": 128, "vocab_size": 102400},
        ("--multi-latent-attention", "--moe-shared-expert-intermediate-size 2816", "--mscale 0.707"),
    ),
    "DeepSeek-V3 in bf16": (
        {"model_type": "deepseek_v3", "attention_bias": False, "first_k_dense_replace": 3, "hidden_size": 7168,
         "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
         "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256,
         "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8,
         "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536,
         "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_theta": 10000,
         "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                          "original_max_position_embeddings": 4096, "type": "yarn"},
         "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_group": 4, "topk_method": "noaux_tc",
         "v_head_dim": 128, "vocab_size": 129280},
        ("--moe-router-num-groups 8 --moe-router-group-topk 4", "--mtp-num-layers 1", "--q-lora-rank 1536",
         "--moe-router-enable-expert-bias", "--moe-router-topk-scaling-factor 2.5"),
    ),
    "GLM-4.5-Air": (
        {"model_type": "glm4_moe", "attention_bias": True, "eos_token_id": [151329, 151336], "head_dim": 128,
         "first_k_dense_replace": 1, "hidden_size": 4096, "intermediate_size": 10944,
         "max_position_embeddings": 131072, "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 128,
         "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 96, "num_experts_per_tok": 8,
         "num_hidden_layers": 46, "num_key_value_heads": 8, "num_nextn_predict_layers": 1,
         "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000,
         "routed_scaling_factor": 1.0, "topk_group": 1, "use_qk_norm": False, "vocab_size": 151552},
        ("--rotary-percent 0.5", "--add-qkv-bias", "--moe-router-score-function sigmoid"),
    ),
    "gpt-oss-20b in bf16": (
        {"model_type": "gpt_oss", "attention_bias": True, "experts_per_token": 4, "head_dim": 64, "hidden_size": 2880,
         "initial_context_length": 4096, "intermediate_size": 2880, "max_position_embeddings": 131072,
         "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8,
         "num_local_experts": 32, "rms_norm_eps": 1e-05, "rope_theta": 150000, "router_aux_loss_coef": 0.9,
         "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn", "truncate": False,
                          "original_max_position_embeddings": 4096},
         "layer_types": ["sliding_attention", "full_attention"] * 12, "sliding_window": 128, "swiglu_limit": 7.0,
         "vocab_size": 201088},
        ("--window-size 127,0", "--softmax-type learnable", "--quick-geglu", "--activation-func-clamp-value 7.0",
         "--no-yarn-correction-range-round-to-int", "--rotary-scaling-factor 32.0"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_configs_of_published_models_are_taken(name: str) -> None:
    from spare_megatron.checkpoint.convert.hf_config import shape_of_config
    from spare_megatron.checkpoint.convert.model_args import flags_of_shape
    from spare_megatron.worker.job_arguments import parse_job

    config, flags = PUBLISHED[name]
    words = flags_of_shape(shape_of_config(config), torch.bfloat16)
    for flag in flags:
        assert f" {flag} " in f" {' '.join(words)} "
    rest = "--mock-data --tokenizer-type NullTokenizer --vocab-size 9 --micro-batch-size 1 --train-iters 2 --lr 1e-3"
    if NOT_LOCAL and name == "DeepSeek-V2-Lite":
        with pytest.raises(ConfigError, match="without --q-lora-rank needs transformer-engine"):
            parse_job([*words, *rest.split(), "--seq-length", "4096", "--transformer-impl", "local"])
    else:
        parse_job([*words, *rest.split(), "--seq-length", "4096", "--transformer-impl", "local"])


def test_parts_of_a_large_model_have_an_index(tmp_path: Path) -> None:
    from spare_megatron.checkpoint.convert.conversion import Wish
    from spare_megatron.checkpoint.convert.conversion import convert as run_it

    model = make("llama", tmp_path / "hf")
    run(tmp_path / "hf", tmp_path / "ours", "hf", "core")
    run_it(tmp_path / "ours", "megatron", tmp_path / "parts", Wish("hf", part_bytes=100_000), lambda *_: None)
    assert len(list((tmp_path / "parts").glob("model-*.safetensors"))) > 2
    assert all(path.is_file() for path in (tmp_path / "parts").iterdir()), "something unfinished was left"
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "parts")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--model-type BERT --load-dir x --save-dir y", "use GPT"),
        ("--model-type GPT --save-dir y", "--load-dir"),
        ("--model-type GPT --loader hf --load-dir nowhere --save-dir y", "nowhere/config.json cannot be read"),
        ("--model-type GPT --loader core --load-dir nowhere --save-dir y", "nowhere does not exist"),
        ("--model-type GPT --loader plugin --load-dir x --save-dir y", "invalid choice"),
        ("--model-type GPT --load-dir x --save-dir y --target-tensor-parallel-size 0", "must be at least 1"),
        ("--model-type GPT --load-dir x --save-dir y --bf16 --fp16", "give one of them"),
    ],
)
def test_refusals_are_one_line(words: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert.main(words.split()) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1


def test_a_layout_that_does_not_fit_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make("llama", tmp_path / "hf")
    words = ["--model-type", "GPT", "--loader", "hf", "--saver", "core", "--load-dir", str(tmp_path / "hf")]
    assert convert.main([*words, "--save-dir", str(tmp_path / "x"), "--target-pipeline-parallel-size", "3"]) == 2
    assert "4 layers are not divisible by --target-pipeline-parallel-size 3" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
