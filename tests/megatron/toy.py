"""A tiny GPT job that both trainers of the parity tests run: sizes, synthetic text, forward step.

Nothing of the adapter is used here, and nothing of the plain reference: both get the same inputs from this module.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

SEQ, VOCAB, HIDDEN, LAYERS, HEADS = 32, 128, 64, 4, 4

TRANSFORMER = {
    "num_layers": LAYERS,
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
MOE = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_aux_loss_coeff": 0.01,
    "moe_ffn_hidden_size": 2 * HIDDEN,
    "moe_token_dispatcher_type": "alltoall",
    "add_bias_linear": False,
}
DEEPSEEK = {
    **MOE,
    "multi_latent_attention": True,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 16,
    "rope_type": "rope",
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": "silu",
    "moe_layer_freq": [0, 1, 1, 1],
    "moe_shared_expert_intermediate_size": 2 * HIDDEN,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.01,
    "mtp_num_layers": 1,
}
"""DeepSeek's kind of model: latent attention, routed and shared experts balanced by a bias, multi-token prediction."""
OPTIMIZER = {"optimizer": "adam", "lr": 1e-2, "min_lr": 1e-3, "weight_decay": 0.1, "clip_grad": 1.0}


def scheduler(steps: int, global_batch_size: int) -> dict[str, Any]:
    """Arguments of OptimizerParamScheduler: warm-up over a tenth of the steps, which short runs have not, then cosine;
    lengths in samples."""
    return {
        "init_lr": 0.0,
        "max_lr": OPTIMIZER["lr"],
        "min_lr": OPTIMIZER["min_lr"],
        "lr_warmup_steps": steps // 10 * global_batch_size,
        "lr_decay_steps": steps * global_batch_size,
        "lr_decay_style": "cosine",
        "start_wd": 0.1,
        "end_wd": 0.1,
        "wd_incr_steps": steps * global_batch_size,
        "wd_incr_style": "constant",
    }


def tokens_of(sample: int) -> torch.Tensor:
    """SEQ + 1 tokens of one sample: an affine recurrence with a little noise, so that there is something to learn."""
    generator = torch.Generator().manual_seed(1000 + sample)
    noise = torch.randint(0, 4, (SEQ + 1,), generator=generator).tolist()
    value, tokens = sample % VOCAB, []
    for extra in noise:
        value = (5 * value + 7 + extra) % VOCAB
        tokens.append(value)
    return torch.tensor(tokens)


def microbatch(samples: Sequence[int]) -> dict[str, torch.Tensor]:
    """What a data loader gives for these samples; the number of tokens that count varies with the sample."""
    text = torch.stack([tokens_of(sample) for sample in samples])
    mask = torch.ones(len(samples), SEQ)
    for row, sample in enumerate(samples):
        mask[row, SEQ - sample % 5 :] = 0.0
    return {"tokens": text[:, :-1].contiguous(), "labels": text[:, 1:].contiguous(), "loss_mask": mask}


def forward_step(data_iterator: Iterator[Any], model: Any, convention: str = "tokens") -> Any:
    """Megatron's forward step; ``convention`` is 'tokens' (3-tuple), 'mean' (the older 2-tuple), or 'thinned': as
    'tokens', but a tenth of them, at random, does not count."""
    batch = next(data_iterator)
    if convention == "thinned":
        batch["loss_mask"] *= torch.rand(batch["loss_mask"].shape) > 0.1
    positions = torch.arange(SEQ).expand_as(batch["tokens"])
    output = model(batch["tokens"], positions, None, labels=batch["labels"], loss_mask=batch["loss_mask"])
    return output, partial(mean_loss if convention == "mean" else token_loss, batch["loss_mask"])


def token_loss(mask: torch.Tensor, losses: torch.Tensor) -> Any:
    """Megatron's loss function since 0.9: (sum, number of tokens, report of [sum, count])."""
    total = (losses.float().view(-1) * mask.view(-1)).sum()
    count = mask.sum().to(torch.int)
    report = torch.cat([total.clone().detach().view(1), count.view(1)])
    return total, count, {"lm loss": report}


def mean_loss(mask: torch.Tensor, losses: torch.Tensor) -> Any:
    """The older convention: (mean of the microbatch, report of means)."""
    mean = (losses.float().view(-1) * mask.view(-1)).sum() / mask.sum()
    return mean, {"lm loss": mean.clone().detach()}
