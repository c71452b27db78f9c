"""Lists the tensors of a model, with megatron-core's names that contain the layer's number, and with shapes before
tensor parallelism. Norms have the names of transformer-engine's layers, which have them inside a linear layer."""

from __future__ import annotations

from spare_megatron.checkpoint.convert.model import OUTPUT, WORDS, Entry, ModelShape

POSITIONS = "embedding.position_embeddings.weight"
FINAL_NORM = "decoder.final_layernorm"
EXPERT_BIAS = "mlp.router.expert_bias"
_OTHERS = ("word_embeddings", "position_embeddings", "output_layer", "router")


def is_linear(entry: Entry) -> bool:
    """Whether it is the weight of a linear layer, beside which megatron-core stores an ``_extra_state``."""
    module, _, kind = entry.name.rpartition(".")
    return kind == "weight" and len(entry.shape) == 2 and module.rpartition(".")[2] not in _OTHERS


def entries(shape: ModelShape) -> list[Entry]:
    """All tensors of the model: the embeddings, then layer by layer, then those that predict more tokens, then final
    norm and output layer."""
    hidden, found = shape.hidden_size, [Entry(WORDS, (shape.padded_vocab_size, shape.hidden_size), 0)]
    if shape.position_embedding_type == "learned_absolute":
        found.append(Entry(POSITIONS, (shape.max_position_embeddings, hidden)))
    for layer in range(shape.num_layers):
        found += _layer(shape, f"decoder.layers.{layer}.", layer, shape.has_experts(layer))
    for number in range(shape.mtp_num_layers or 0):
        found += _predictor(shape, f"mtp.layers.{number}.", shape.num_layers + number)
    found += _norm(shape, f"{FINAL_NORM}.", None)
    if shape.untie_embeddings_and_output_weights:
        found.append(Entry(OUTPUT, (shape.padded_vocab_size, hidden), 0))
    return found


def _predictor(shape: ModelShape, top: str, layer: int) -> list[Entry]:
    """A layer that predicts one more token: a projection, and a layer as the decoder's last one."""
    found = _norm(shape, f"{top}enorm.", layer) + _norm(shape, f"{top}hnorm.", layer)
    found.append(Entry(f"{top}eh_proj.weight", (shape.hidden_size, 2 * shape.hidden_size), 0, layer=layer))
    found += _layer(shape, f"{top}transformer_layer.", layer, shape.has_experts(shape.num_layers - 1))
    return found + _norm(shape, f"{top}final_layernorm.", layer)


def _layer(shape: ModelShape, top: str, layer: int, experts: bool) -> list[Entry]:
    attention = f"{top}self_attention."
    if shape.multi_latent_attention:
        found = _norm(shape, f"{top}input_layernorm.", layer) + _latent(shape, attention, layer)
        heads = shape.num_attention_heads * (shape.v_head_dim or 0)
    else:
        found = _norm(shape, f"{attention}linear_qkv.layer_norm_", layer) + _queries(shape, attention, layer)
        heads = shape.num_attention_heads * shape.kv_channels
    if shape.softmax_type == "learnable":
        found.append(Entry(f"{attention}core_attention.softmax_offset", (shape.num_attention_heads,), 0, layer=layer))
    found.append(Entry(f"{attention}linear_proj.weight", (shape.hidden_size, heads), 1, layer=layer))
    if shape.add_bias_linear:
        found.append(Entry(f"{attention}linear_proj.bias", (shape.hidden_size,), layer=layer))
    if not experts:
        found += _norm(shape, f"{top}mlp.linear_fc1.layer_norm_", layer)
        return found + _feed_forward(shape, f"{top}mlp.", shape.ffn_hidden_size, layer)
    return found + _norm(shape, f"{top}pre_mlp_layernorm.", layer) + _experts(shape, top, layer)


def _queries(shape: ModelShape, attention: str, layer: int) -> list[Entry]:
    """Queries, keys and values of usual attention."""
    wide = shape.num_query_groups * shape.group_width
    found = [Entry(f"{attention}linear_qkv.weight", (wide, shape.hidden_size), 0, layer=layer)]
    if shape.add_qkv_bias:
        found.append(Entry(f"{attention}linear_qkv.bias", (wide,), 0, layer=layer))
    if shape.qk_layernorm:
        for name in ("q_layernorm.", "k_layernorm."):
            found += _norm(shape, attention + name, layer, shape.kv_channels)
    return found


def _latent(shape: ModelShape, attention: str, layer: int) -> list[Entry]:
    """Queries, keys and values of multi-latent attention."""
    hidden, heads = shape.hidden_size, shape.num_attention_heads
    own, turned, values = shape.qk_head_dim or 0, shape.qk_pos_emb_head_dim or 0, shape.v_head_dim or 0
    latent = shape.kv_lora_rank or 0
    if shape.q_lora_rank is None:
        found = [Entry(f"{attention}linear_q_proj.weight", (heads * (own + turned), hidden), 0, layer=layer)]
    else:
        found = [Entry(f"{attention}linear_q_down_proj.weight", (shape.q_lora_rank, hidden), 0, layer=layer)]
        found += _norm(shape, f"{attention}linear_q_up_proj.layer_norm_", layer, shape.q_lora_rank)
        rows = heads * (own + turned)
        found.append(Entry(f"{attention}linear_q_up_proj.weight", (rows, shape.q_lora_rank), 0, layer=layer))
    found.append(Entry(f"{attention}linear_kv_down_proj.weight", (latent + turned, hidden), 0, layer=layer))
    found += _norm(shape, f"{attention}linear_kv_up_proj.layer_norm_", layer, latent)
    found.append(Entry(f"{attention}linear_kv_up_proj.weight", (heads * (own + values), latent), 0, layer=layer))
    return found


def _experts(shape: ModelShape, top: str, layer: int) -> list[Entry]:
    """The router, all experts and the shared one of a layer."""
    count, wide = shape.num_experts or 0, shape.moe_ffn_hidden_size or shape.ffn_hidden_size
    found = [Entry(f"{top}mlp.router.weight", (count, shape.hidden_size), layer=layer)]
    if shape.add_bias_linear:
        found.append(Entry(f"{top}mlp.router.bias", (count,), layer=layer))
    if shape.moe_router_enable_expert_bias:
        found.append(Entry(top + EXPERT_BIAS, (count,), layer=layer))
    for expert in range(count):
        found += _feed_forward(shape, f"{top}mlp.experts.{expert}.", wide, layer, expert)
    if shape.moe_shared_expert_intermediate_size:
        shared = shape.moe_shared_expert_intermediate_size
        found += _feed_forward(shape, f"{top}mlp.shared_experts.", shared, layer)
    return found


def _norm(shape: ModelShape, prefix: str, layer: int | None, width: int | None = None) -> list[Entry]:
    names = ("weight", "bias") if shape.normalization == "LayerNorm" else ("weight",)
    return [Entry(prefix + name, (width or shape.hidden_size,), layer=layer) for name in names]


def _feed_forward(shape: ModelShape, prefix: str, wide: int, layer: int, expert: int | None = None) -> list[Entry]:
    hidden, rows = shape.hidden_size, 2 * wide if shape.gated else wide
    found = [
        Entry(f"{prefix}linear_fc1.weight", (rows, hidden), 0, shape.gated, layer, expert),
        Entry(f"{prefix}linear_fc2.weight", (hidden, wide), 1, layer=layer, expert=expert),
    ]
    if shape.add_bias_linear:
        found += [
            Entry(f"{prefix}linear_fc1.bias", (rows,), 0, shape.gated, layer, expert),
            Entry(f"{prefix}linear_fc2.bias", (hidden,), layer=layer, expert=expert),
        ]
    return found
