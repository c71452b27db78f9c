"""Tiny random models of transformers, in the form that its users have them in, and their conversion."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from spare_megatron.cli import convert

SEED, VOCAB = 7, 100
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
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", LLAMA),
    "llama-tied": ("Llama", {**LLAMA, "tie_word_embeddings": True, "head_dim": 32}),
    "mixtral": ("Mixtral", {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt2": ("GPT2", GPT2),
    "qwen2": ("Qwen2", LLAMA),
    "qwen3": ("Qwen3", {**LLAMA, "head_dim": 16}),
}


def make(kind: str, folder: Path, **other: Any) -> Any:
    """A tiny random model of transformers, written as its users write theirs; ``other`` changes its config."""
    import transformers

    name, values = MODELS[kind]
    torch.manual_seed(SEED)
    config = getattr(transformers, f"{name}Config")(**{**values, **other})
    model = getattr(transformers, f"{name}LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")(config)
    for parameter in model.parameters():  # norms and biases too, which are ones and zeros at first
        if parameter.dim() == 1:
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    model.eval().save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return model


def run(load: Path, save: Path, loader: str, saver: str, *words: str) -> None:
    """A conversion, which must succeed."""
    paths = ("--load-dir", str(load), "--save-dir", str(save))
    assert convert.main(["--model-type", "GPT", "--loader", loader, "--saver", saver, *paths, *words]) == 0
