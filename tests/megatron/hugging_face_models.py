"""Tiny random models of transformers, in the form that its users have them in, and their conversion."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from spare_megatron.checkpoint.folder import step_of
from spare_megatron.cli import convert
from spare_megatron.megatron_adapter.versions import release

SEED, VOCAB = 7, 100
NOT_LOCAL = {"deepseek-v2"} if release() >= (0, 19) else set[str]()
"""Kinds of models that this megatron-core's local layers cannot be: latent queries without a norm of their own."""
LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
GPT2 = {
    "vocab_size": VOCAB,
    "n_embd": 64,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 64,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS = {**LLAMA, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
SHARED = {
    **EXPERTS,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
DEEPSEEK = {
    **SHARED,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
GROUPS = {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 4}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "mscale": 0.8,
    "mscale_all_dim": 0.9,
}
GPT_OSS = {
    **LLAMA,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 5,
    "swiglu_limit": 0.5,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", LLAMA),
    "llama-tied": ("Llama", {**LLAMA, "tie_word_embeddings": True, "head_dim": 32}),
    "mixtral": ("Mixtral", {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt2": ("GPT2", GPT2),
    "qwen2": ("Qwen2", LLAMA),
    "qwen3": ("Qwen3", {**LLAMA, "head_dim": 16}),
    "qwen3-moe": ("Qwen3Moe", {**EXPERTS, "head_dim": 32, "num_experts": 4, "mlp_only_layers": [1]}),
    "qwen3-moe-sums": ("Qwen3Moe", {**EXPERTS, "head_dim": 16, "num_experts": 4, "norm_topk_prob": True}),
    "deepseek-v2": ("DeepseekV2", {**DEEPSEEK, "q_lora_rank": None, "topk_method": "greedy"}),
    "deepseek-v3": ("DeepseekV3", {**DEEPSEEK, **GROUPS, "q_lora_rank": 32, "rope_parameters": YARN}),
    "glm4-moe": ("Glm4Moe", {**SHARED, "head_dim": 32, "attention_bias": True, "use_qk_norm": True}),
    "gpt-oss": ("GptOss", {**GPT_OSS, "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0}}),
    "gpt-oss-yarn": ("GptOss", GPT_OSS),
}
EXPERT_KINDS = tuple(kind for kind, (_, values) in MODELS.items() if "num_experts_per_tok" in values)


def make(kind: str, folder: Path, **other: Any) -> Any:
    """A tiny random model of transformers, written as its users write theirs; ``other`` changes its config."""
    import transformers

    name, values = MODELS[kind]
    torch.manual_seed(SEED)
    config = getattr(transformers, f"{name}Config")(**{**values, **other})
    model = getattr(transformers, f"{name}LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")(config)
    for name, parameter in model.named_parameters():  # norms and biases too, which are ones and zeros at first
        if parameter.dim() == 1 or name.endswith("_bias"):
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.add_(0.1 * torch.randn_like(buffer))
    model.eval().save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return model


def add_predictors(folder: Path, number: int) -> None:
    """Give a model of DeepSeek's or GLM's kind layers that predict more tokens, as the published ones have them."""
    import json

    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    last = f"model.layers.{layers - 1}."
    for layer in range(layers, layers + number):
        top = f"model.layers.{layer}."
        tensors |= {top + name.removeprefix(last): one + 0.01 for name, one in tensors.items() if name.startswith(last)}
        tensors |= {f"{top}{name}.weight": torch.rand(hidden) for name in ("enorm", "hnorm", "shared_head.norm")}
        tensors[f"{top}eh_proj.weight"] = torch.rand(hidden, 2 * hidden)
        tensors[f"{top}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{top}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config["num_nextn_predict_layers"] = number
    (folder / "config.json").write_text(json.dumps(config))


def run(load: Path, save: Path, loader: str, saver: str, *words: str) -> None:
    """A conversion, which must succeed."""
    paths = ("--load-dir", str(load), "--save-dir", str(save))
    assert convert.main(["--model-type", "GPT", "--loader", loader, "--saver", saver, *paths, *words]) == 0


def flags_of(converted: Path) -> list[str]:
    """The flags of the model that a conversion wrote beside its checkpoint."""
    return shlex.split((converted / "model_flags.txt").read_text())


def logits_of(
    flags: Sequence[str],
    checkpoint: Path,
    tokens: torch.Tensor,
    rows: int = 128,
    labels: torch.Tensor | None = None,
    look: Callable[[torch.nn.Module], None] = lambda model: None,
) -> torch.Tensor:
    """Of the model that ``flags`` describe, whose vocabulary is padded to ``rows``, with the weights loaded as a job
    loads them; with ``labels`` the loss of each token. ``look`` is called with the model."""
    from spare_megatron.megatron_adapter.checkpoint import group_checkpoint
    from spare_megatron.megatron_adapter.model import world
    from spare_megatron.megatron_adapter.model.replica import build_replica
    from spare_megatron.worker.job_arguments import parse_job

    rest = "--mock-data --tokenizer-type NullTokenizer --vocab-size 10 --micro-batch-size 1 --train-iters 2 --lr 1e-3"
    length = tokens.shape[1]
    job, _ = parse_job([*flags, *rest.split(), "--seq-length", str(length), "--transformer-impl", "local"])
    here = world.init_group_world(job.shape, 0, torch.distributed.HashStore(), timeout_s=60.0)
    try:
        replica = build_replica(job.settings(rows), here)
        start = group_checkpoint.load(checkpoint, replica, optimizer=False)
        assert start.step == step_of(checkpoint)
        model = replica.chunks[0].eval()
        look(model)
        positions = torch.arange(length).expand_as(tokens)
        mask = torch.ones(1, 1, length, length).triu(1).bool()
        with torch.no_grad():
            return model(tokens, positions, mask, labels=labels).float()  # type: ignore[no-any-return]
    finally:
        world.destroy()
