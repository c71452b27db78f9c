"""What becomes of each flag of a published configuration that cannot stay as it is, and why.

The result is so small that a machine without GPU trains it in seconds; flags without a rule stay.
"""

from __future__ import annotations

from dataclasses import dataclass

STEPS, WARM_UP_STEPS, SEQ_LENGTH, LAYERS = 10, 2, 32, 4
PHASES = ((4, 16), (3, 32), (3, 64))
"""(steps, samples of a batch): what a batch schedule becomes."""
LAYOUT = "--pipeline-model-parallel-layout"
SAMPLES = sum(steps * size for steps, size in PHASES)
"""Samples of all steps of a job with a batch schedule."""

Values = tuple[str, ...]


@dataclass(frozen=True)
class Rule:
    """What becomes of ``flags``: they get at most the number ``at_most``, or ``value``, or ``times`` as much, or stay
    with ``stays``, or, without any of these, are dropped."""

    reason: str
    flags: tuple[str, ...]
    at_most: int | None = None
    value: str | None = None
    times: float | None = None
    stays: bool = False

    def apply(self, old: Values) -> Values | None:
        """The new values of one flag; None drops it."""
        if self.stays:
            return old
        if self.at_most is not None:
            return (str(min(int(old[0]), self.at_most)),)
        if self.times is not None:
            return (f"{float(old[0]) * self.times:g}",)
        return None if self.value is None else (self.value,)


RULES = (
    Rule("two cores: a group has at most TP2, PP2 and EP2", ("--tensor-model-parallel-size",), at_most=2),
    Rule("as TP", ("--pipeline-model-parallel-size", "--expert-model-parallel-size"), at_most=2),
    Rule("expert tensor ranks are no more than tensor ranks", ("--expert-tensor-parallel-size",), at_most=2),
    Rule("two chunks on each stage show what more would", ("--num-virtual-stages-per-pipeline-rank",), at_most=2),
    Rule("one layer a chunk", ("--num-layers-per-virtual-pipeline-stage",), value="1"),
    Rule("few layers", ("--num-layers",), at_most=LAYERS),
    Rule("an uneven split of 4 layers over 2 stages", ("--decoder-first-pipeline-num-layers",), value="1"),
    Rule("an uneven split of 4 layers over 2 stages", ("--decoder-last-pipeline-num-layers",), value="3"),
    Rule("an even layout of few layers", (LAYOUT,), value="Ett|ttmL"),
    Rule(
        "one dense layer, then layers with experts, as there", ("--moe-layer-freq",), value=f"([0]*1+[1]*{LAYERS - 1})"
    ),
    Rule("small", ("--hidden-size",), value="64"),
    Rule("small", ("--num-attention-heads", "--num-experts"), at_most=8),
    Rule("fewer key and value heads than heads", ("--num-query-groups",), value="2"),
    Rule("not hidden size / heads, as there", ("--kv-channels",), value="16"),
    Rule("small, twice the hidden size", ("--ffn-hidden-size",), value="128"),
    Rule("small", ("--moe-ffn-hidden-size", "--moe-shared-expert-intermediate-size"), value="64"),
    Rule("fewer than the experts", ("--moe-router-topk",), at_most=4),
    Rule("short sequences", ("--seq-length", "--max-position-embeddings"), value=str(SEQ_LENGTH)),
    Rule("small", ("--micro-batch-size",), at_most=4),
    Rule(
        "a few microbatches for each group, a power of two: Megatron divides each loss by that number, and to divide "
        "by another one rounds each gradient of a bf16 backward pass",
        ("--global-batch-size",),
        at_most=32,
    ),
    Rule(
        "no more than the microbatches of a group", ("--microbatch-group-size-per-virtual-pipeline-stage",), at_most=4
    ),
    Rule("10 steps", ("--train-iters",), value=str(STEPS)),
    Rule("10 steps", ("--train-samples", "--lr-decay-samples"), value=str(SAMPLES)),
    Rule(
        "three sizes, each for some of the 10 steps, all powers of two as --global-batch-size",
        ("--step-batch-size-schedule",),
        value=" ".join(
            f"{sum(steps * size for steps, size in PHASES[:n]) * SEQ_LENGTH}:{PHASES[n][1]}" for n in range(len(PHASES))
        ),
    ),
    Rule(
        "the 10 steps go through warm-up and decay, not the first 10 of 3200 of warm-up",
        ("--lr-decay-iters",),
        value=str(STEPS),
    ),
    Rule("as --lr-decay-iters", ("--lr-warmup-fraction",), value=str(WARM_UP_STEPS / STEPS)),
    Rule("as --lr-decay-iters", ("--lr-warmup-samples",), at_most=WARM_UP_STEPS * PHASES[0][1]),
    Rule(
        "a small model must learn something in 10 steps, else equal losses would say little",
        ("--lr", "--min-lr", "--decoupled-lr", "--decoupled-min-lr"),
        times=10,
    ),
    Rule("no CUDA", ("--distributed-backend",), value="gloo"),
    Rule("no transformer-engine", ("--transformer-impl",), value="local"),
    Rule("no transformer-engine", ("--attention-backend",), value="unfused"),
    Rule("training is compared, not evaluation", ("--eval-iters",), value="0"),
    Rule("training is compared, not evaluation", ("--eval-global-batch-size",)),
    Rule(
        "its random numbers are keyed by the piece here, and drawn one after another in Megatron",
        ("--attention-dropout", "--hidden-dropout"),
    ),
    Rule(
        "needs transformer-engine, and parts of it CUDA",
        (
            *("--apply-layernorm-1p", "--context-parallel-size", "--cp-comm-type"),
            *("--hierarchical-context-parallel-sizes", "--fp8-format", "--fp8-recipe", "--fp8-param-gather"),
            *("--use-transformer-engine-op-fuser", "--multi-latent-attention", "--q-lora-rank", "--kv-lora-rank"),
            *("--qk-head-dim", "--qk-pos-emb-head-dim", "--v-head-dim", "--rotary-scaling-factor", "--mscale"),
            *("--mscale-all-dim", "--experimental-attention-variant", "--linear-attention-freq"),
            *("--linear-conv-kernel-dim", "--linear-key-head-dim", "--linear-num-key-heads"),
            *("--linear-num-value-heads", "--linear-value-head-dim"),
        ),
    ),
    Rule("needs CUDA; experts one by one compute the same", ("--moe-grouped-gemm",)),
    Rule(
        "an order of ranks that megatron-core gives experts only beside context parallelism",
        ("--use-tp-pp-dp-mapping",),
    ),
    Rule(
        "data is made up, as its files are not published",
        (
            *("--data-path", "--mock-data", "--data-cache-path", "--tokenizer-type", "--tokenizer-model"),
            *("--vocab-size", "--vocab-file", "--merge-file", "--fim-data", "--fim-rate", "--fim-spm-rate"),
        ),
    ),
    Rule(
        "a job that starts anew and saves nothing",
        (
            *("--save", "--load", "--save-interval", "--save-retain-interval", "--finetune", "--no-load-optim"),
            *("--exit-interval", "--override-opt_param-scheduler", "--use-checkpoint-opt_param-scheduler"),
        ),
    ),
    Rule(
        "metrics.jsonl has the losses",
        ("--tensorboard-dir", "--wandb-project", "--wandb-entity", "--wandb-exp-name", "--wandb-save-dir"),
    ),
    Rule("sums in fp32 are not the same everywhere", ("--check-weight-hash-across-dp-replicas-interval",)),
)
"""Each flag is in one rule."""

ADDED = (
    *("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "255", "--num-workers", "0"),
    *("--attention-dropout", "0", "--hidden-dropout", "0", "--initial-loss-scale", "65536"),
)
"""What every configuration gets: data that is made up, no random numbers while it trains, and, for fp16, a loss scale
at which the first step is not skipped (from 2^32 the first 16 would be)."""
