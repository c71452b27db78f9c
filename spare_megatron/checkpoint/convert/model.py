"""Describes a model for a conversion: its sizes, by the names of Megatron's flags, and the list of its tensors.

:class:`ModelShape` is made from a checkpoint's ``args`` or a Hugging Face ``config.json``. :func:`entries` lists all
tensors, with megatron-core's names that contain the layer's number, and with shapes before tensor parallelism.
"""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from spare_megatron.config.errors import ConfigError


@dataclass(frozen=True)
class ModelShape:
    """Sizes and switches of a decoder, by the names of Megatron's flags."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    ffn_hidden_size: int
    max_position_embeddings: int
    padded_vocab_size: int
    vocab_size: int | None = None
    """Number of ids that the tokenizer has, where it is known; the other rows are padding."""
    normalization: str = "LayerNorm"
    norm_epsilon: float = 1e-5
    position_embedding_type: str = "learned_absolute"
    rotary_base: int = 10000
    rotary_percent: float = 1.0
    rotary_seq_len_interpolation_factor: float | None = None
    use_rope_scaling: bool = False
    rope_scaling_factor: float = 8.0
    untie_embeddings_and_output_weights: bool = False
    add_bias_linear: bool = True
    add_qkv_bias: bool = True
    qk_layernorm: bool = False
    swiglu: bool = False
    bias_gelu_fusion: bool = True
    """True means GELU in its tanh form, which Megatron's fused kernel computes; False means the exact one."""
    num_experts: int | None = None
    moe_router_topk: int = 2
    moe_aux_loss_coeff: float = 0.0
    attention_dropout: float = 0.1
    hidden_dropout: float = 0.1

    @property
    def group_width(self) -> int:
        """Rows of the fused query, key and value weight that belong to one query group."""
        return (self.num_attention_heads // self.num_query_groups + 2) * self.kv_channels


@dataclass(frozen=True)
class Entry:
    """One logical tensor."""

    name: str
    shape: tuple[int, ...]
    axis: int | None = None
    """The axis that tensor parallelism splits."""
    gated: bool = False
    """Whether it has two halves along axis 0 (gate and input), each of which is split by itself."""
    layer: int | None = None
    expert: int | None = None

    @property
    def vocabulary(self) -> bool:
        """Whether it has one row for each token id."""
        return self.name in (WORDS, OUTPUT)


class TensorSource(Protocol):
    """Reads a checkpoint, one logical tensor at a time."""

    shape: ModelShape
    iteration: int
    args: Mapping[str, Any]
    """Megatron's args as the checkpoint has them; empty for other formats."""
    folder: Path
    """Where tokenizer files are looked for."""

    def read(self, entry: Entry) -> torch.Tensor:
        """The whole tensor. Where rows are token ids, their number may differ from the entry's (other padding)."""

    def dtype(self, entry: Entry) -> torch.dtype:
        """The tensor's stored dtype, found without reading the tensor."""


WORDS, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
POSITIONS = "embedding.position_embeddings.weight"
FINAL_NORM = "decoder.final_layernorm"


def entries(shape: ModelShape) -> list[Entry]:
    """All tensors of the model: the embeddings, then layer by layer, then final norm and output layer."""
    hidden, found = shape.hidden_size, [Entry(WORDS, (shape.padded_vocab_size, shape.hidden_size), 0)]
    if shape.position_embedding_type == "learned_absolute":
        found.append(Entry(POSITIONS, (shape.max_position_embeddings, hidden)))
    for layer in range(shape.num_layers):
        found += _layer(shape, layer)
    found += _norm(shape, f"{FINAL_NORM}.", None)
    if shape.untie_embeddings_and_output_weights:
        found.append(Entry(OUTPUT, (shape.padded_vocab_size, hidden), 0))
    return found


def _layer(shape: ModelShape, layer: int) -> list[Entry]:
    top, hidden = f"decoder.layers.{layer}.", shape.hidden_size
    attention, wide = f"{top}self_attention.", shape.num_query_groups * shape.group_width
    found = _norm(shape, f"{attention}linear_qkv.layer_norm_", layer)
    found.append(Entry(f"{attention}linear_qkv.weight", (wide, hidden), 0, layer=layer))
    if shape.add_qkv_bias:
        found.append(Entry(f"{attention}linear_qkv.bias", (wide,), 0, layer=layer))
    if shape.qk_layernorm:
        for name in ("q_layernorm.", "k_layernorm."):
            found += _norm(shape, attention + name, layer, shape.kv_channels)
    heads = shape.num_attention_heads * shape.kv_channels
    found.append(Entry(f"{attention}linear_proj.weight", (hidden, heads), 1, layer=layer))
    if shape.add_bias_linear:
        found.append(Entry(f"{attention}linear_proj.bias", (hidden,), layer=layer))
    if shape.num_experts is None:
        found += _norm(shape, f"{top}mlp.linear_fc1.layer_norm_", layer)
        return found + _feed_forward(shape, f"{top}mlp.", layer)
    found += _norm(shape, f"{top}pre_mlp_layernorm.", layer)
    found.append(Entry(f"{top}mlp.router.weight", (shape.num_experts, hidden), layer=layer))
    for expert in range(shape.num_experts):
        found += _feed_forward(shape, f"{top}mlp.experts.{expert}.", layer, expert)
    return found


def _norm(shape: ModelShape, prefix: str, layer: int | None, width: int | None = None) -> list[Entry]:
    names = ("weight", "bias") if shape.normalization == "LayerNorm" else ("weight",)
    return [Entry(prefix + name, (width or shape.hidden_size,), layer=layer) for name in names]


def _feed_forward(shape: ModelShape, prefix: str, layer: int, expert: int | None = None) -> list[Entry]:
    wide, hidden = shape.ffn_hidden_size, shape.hidden_size
    rows = 2 * wide if shape.swiglu else wide
    found = [
        Entry(f"{prefix}linear_fc1.weight", (rows, hidden), 0, shape.swiglu, layer, expert),
        Entry(f"{prefix}linear_fc2.weight", (hidden, wide), 1, layer=layer, expert=expert),
    ]
    if shape.add_bias_linear:
        found += [
            Entry(f"{prefix}linear_fc1.bias", (rows,), 0, shape.swiglu, layer, expert),
            Entry(f"{prefix}linear_fc2.bias", (hidden,), layer=layer, expert=expert),
        ]
    return found


def shape_of_args(args: Mapping[str, Any], where: str) -> ModelShape:
    """The model that Megatron's ``args`` describe. ConfigError, which names ``where``, if it cannot be converted."""
    unsupported = {
        "multi_latent_attention": (False, None),
        "squared_relu": (False, None),
        "quick_geglu": (False, None),
        "moe_shared_expert_intermediate_size": (None, 0),
        "mtp_num_layers": (None, 0),
        "attention_output_gate": (False, None),
        "moe_layer_freq": (1, None),
        "moe_router_enable_expert_bias": (False, None),
        "is_hybrid_model": (False, None),
        "moe_latent_size": (None, 0),
    }
    for name, plain in unsupported.items():
        if args.get(name, plain[0]) not in plain:
            raise ConfigError(
                f"{where} is of a model with {name} {args[name]}, which is not converted; "
                "GPT-2, Llama, Mixtral and Qwen2/3 kinds are"
            )
    heads = _needed(args, "num_attention_heads", where)
    known = {field.name: args[field.name] for field in dataclasses.fields(ModelShape) if field.name in args}
    known["vocab_size"] = vocabulary_ids(args)
    known["num_query_groups"] = args["num_query_groups"] if args.get("group_query_attention") else heads
    known["kv_channels"] = args.get("kv_channels") or _needed(args, "hidden_size", where) // heads
    known["norm_epsilon"] = args.get("layernorm_epsilon", args.get("norm_epsilon", 1e-5))
    known["add_qkv_bias"] = bool(args.get("add_qkv_bias") or args.get("add_bias_linear", True))
    if known.get("num_experts"):
        known["ffn_hidden_size"] = args.get("moe_ffn_hidden_size") or args["ffn_hidden_size"]
    coefficient = known.get("moe_aux_loss_coeff")
    known["moe_aux_loss_coeff"] = coefficient if isinstance(coefficient, (int, float)) else 0.0
    for name in ("num_layers", "hidden_size", "ffn_hidden_size", "max_position_embeddings", "padded_vocab_size"):
        _needed(known, name, where)
    return ModelShape(**known)


IDS = "spare_vocabulary_ids"
"""The name, in args, of the number of rows of the vocabulary that the job's tokenizer can ask for."""


def vocabulary_ids(args: Mapping[str, Any]) -> int | None:
    """Number of ids of the tokenizer with which a checkpoint was trained; None where its args do not say it.

    Megatron's own args have only ``vocab_size``, the flag, to which NullTokenizer adds an end token.
    """
    said, padded = args.get(IDS), args.get("padded_vocab_size")
    if said is None and args.get("vocab_size") is not None:
        said = args["vocab_size"] + (args.get("tokenizer_type") == "NullTokenizer")
    return said if said is None or padded is None else min(said, padded)


def _needed(args: Mapping[str, Any], name: str, where: str) -> Any:
    if args.get(name) is None:
        raise ConfigError(f"the args of {where} have no {name}; convert a checkpoint that was saved with all its args")
    return args[name]


def args_of_shape(shape: ModelShape, dtype: torch.dtype, tensor: int, pipeline: int, expert: int) -> dict[str, Any]:
    """Megatron's ``args`` of a model and its parallel degrees, as Megatron's tools and ``--use-checkpoint-args`` read
    them."""
    values = dataclasses.asdict(shape)
    values.update(
        group_query_attention=shape.num_query_groups != shape.num_attention_heads,
        layernorm_epsilon=shape.norm_epsilon,
        moe_ffn_hidden_size=shape.ffn_hidden_size if shape.num_experts else None,
        use_rotary_position_embeddings=shape.position_embedding_type == "rope",
        add_position_embedding=shape.position_embedding_type != "rope",
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        expert_model_parallel_size=expert,
        encoder_num_layers=shape.num_layers,
        seq_length=shape.max_position_embeddings,
        fp16=dtype == torch.float16,
        bf16=dtype == torch.bfloat16,
        consumed_train_samples=0,
        consumed_valid_samples=0,
    )
    return values


def flags_of_shape(shape: ModelShape, dtype: torch.dtype) -> list[str]:
    """The flags of ``pretrain_gpt.py`` that describe this model."""
    words = [
        *("--num-layers", str(shape.num_layers), "--hidden-size", str(shape.hidden_size)),
        *("--num-attention-heads", str(shape.num_attention_heads), "--kv-channels", str(shape.kv_channels)),
        *("--ffn-hidden-size", str(shape.ffn_hidden_size)),
        *("--max-position-embeddings", str(shape.max_position_embeddings)),
        *("--normalization", shape.normalization, "--norm-epsilon", repr(shape.norm_epsilon)),
        *("--position-embedding-type", shape.position_embedding_type),
        *("--attention-dropout", repr(shape.attention_dropout), "--hidden-dropout", repr(shape.hidden_dropout)),
    ]
    if shape.num_query_groups != shape.num_attention_heads:
        words += ["--group-query-attention", "--num-query-groups", str(shape.num_query_groups)]
    if shape.position_embedding_type == "rope":
        words += ["--rotary-base", str(shape.rotary_base), "--rotary-percent", repr(shape.rotary_percent)]
        if shape.rotary_seq_len_interpolation_factor:
            words += ["--rotary-seq-len-interpolation-factor", f"{shape.rotary_seq_len_interpolation_factor:g}"]
        if shape.use_rope_scaling:
            words += ["--use-rope-scaling", "--rope-scaling-factor", repr(shape.rope_scaling_factor)]
    if shape.num_experts is not None:
        words += ["--num-experts", str(shape.num_experts), "--moe-router-topk", str(shape.moe_router_topk)]
        words += ["--moe-aux-loss-coeff", repr(shape.moe_aux_loss_coeff), "--moe-token-dispatcher-type", "alltoall"]
    switches = {
        "--untie-embeddings-and-output-weights": shape.untie_embeddings_and_output_weights,
        "--disable-bias-linear": not shape.add_bias_linear,
        "--add-qkv-bias": shape.add_qkv_bias and not shape.add_bias_linear,
        "--qk-layernorm": shape.qk_layernorm,
        "--swiglu": shape.swiglu,
        "--no-bias-gelu-fusion": not shape.bias_gelu_fusion and not shape.swiglu,
        "--bf16": dtype == torch.bfloat16,
        "--fp16": dtype == torch.float16,
    }
    return words + [name for name, given in switches.items() if given]


def namespace(values: Mapping[str, Any]) -> Namespace:
    """``args`` as Megatron stores them."""
    return Namespace(**values)
