"""Makes a published configuration so small that a machine without GPU trains it in seconds.

``RULES`` says what becomes of each flag that cannot stay as it is, and why; flags without a rule stay. What
``ADDED`` names is given to every configuration. Both sides of a comparison get the same flags.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

STEPS, WARM_UP_STEPS, SEQ_LENGTH, GROUP_MAX, LAYERS = 10, 2, 32, 4, 4
GROUPS = 2
PHASES = ((4, 16), (3, 32), (3, 48))
"""(steps, samples of a batch): what a batch schedule becomes."""
SAMPLES = sum(steps * size for steps, size in PHASES)
"""Samples of all steps of a job with a batch schedule."""

Values = tuple[str, ...]


@dataclass(frozen=True)
class Rule:
    """What becomes of ``flags``: numbers above ``at_most`` become it, or ``value``; other values become ``value``, or
    ``times`` as much; without any of these flags are dropped."""

    reason: str
    flags: tuple[str, ...]
    at_most: int | None = None
    value: str | None = None
    times: float | None = None

    def apply(self, old: Values) -> Values | None:
        """The new values of one flag; None drops it."""
        if self.at_most is not None:
            return old if int(old[0]) <= self.at_most else (self.value or str(self.at_most),)
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
    Rule("one dense layer, then layers with experts, as there", ("--moe-layer-freq",), value=f"([0]*1+[1]*{LAYERS - 1})"),
    Rule("small", ("--hidden-size",), value="64"),
    Rule("small", ("--num-attention-heads", "--num-experts"), at_most=8),
    Rule("fewer key and value heads than heads", ("--num-query-groups",), value="2"),
    Rule("not hidden size / heads, as there", ("--kv-channels",), value="16"),
    Rule("small, twice the hidden size", ("--ffn-hidden-size",), value="128"),
    Rule("small", ("--moe-ffn-hidden-size", "--moe-shared-expert-intermediate-size"), value="64"),
    Rule("fewer than the experts", ("--moe-router-topk",), at_most=4),
    Rule("short sequences", ("--seq-length", "--max-position-embeddings"), value=str(SEQ_LENGTH)),
    Rule("small", ("--micro-batch-size",), at_most=4),
    Rule("a few microbatches for each group", ("--global-batch-size",), at_most=40, value="32"),
    Rule("10 steps", ("--train-iters",), value=str(STEPS)),
    Rule("10 steps", ("--train-samples", "--lr-decay-samples"), value=str(SAMPLES)),
    Rule(
        "the same three sizes in relation to each other, each for some of the 10 steps",
        ("--step-batch-size-schedule",),
        value=" ".join(
            f"{sum(steps * size for steps, size in PHASES[:n]) * SEQ_LENGTH}:{PHASES[n][1]}"
            for n in range(len(PHASES))
        ),
    ),
    Rule("the 10 steps go through warm-up and decay, not the first 10 of 3200 of warm-up", ("--lr-decay-iters",), value=str(STEPS)),
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
    Rule("dropped random numbers: here they are keyed by the piece, in Megatron drawn one after another", ("--attention-dropout", "--hidden-dropout")),
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
        "data is made up, as its files are not published",
        (
            *("--data-path", "--mock-data", "--data-cache-path", "--tokenizer-type", "--tokenizer-model"),
            *("--vocab-size", "--vocab-file", "--merge-file"),
        ),
    ),
    Rule(
        "a job that starts anew and saves nothing",
        (
            *("--save", "--load", "--save-interval", "--save-retain-interval", "--finetune", "--no-load-optim"),
            *("--exit-interval", "--override-opt_param-scheduler", "--use-checkpoint-opt_param-scheduler"),
        ),
    ),
    Rule("metrics.jsonl has the losses", ("--tensorboard-dir", "--wandb-project", "--wandb-entity", "--wandb-exp-name", "--wandb-save-dir")),
    Rule("sums in fp32 are not the same everywhere", ("--check-weight-hash-across-dp-replicas-interval",)),
)
"""Each flag is in one rule."""

ADDED = (
    *("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "255", "--num-workers", "0"),
    *("--attention-dropout", "0", "--hidden-dropout", "0", "--initial-loss-scale", "65536"),
)
"""What every configuration gets: data that is made up, no random numbers while it trains, and, for fp16, a loss scale
at which the first step is not skipped (from 2^32 the first 16 would be)."""


@dataclass
class Shrunk:
    """A configuration as it is trained, and what was done to it."""

    kept: dict[str, Values] = field(default_factory=dict)
    changed: dict[str, tuple[Values, Values]] = field(default_factory=dict)
    """Flag -> (values there, values here)."""
    dropped: dict[str, Values] = field(default_factory=dict)

    @property
    def words(self) -> list[str]:
        """The command line."""
        now = {**self.kept, **{flag: new for flag, (_, new) in self.changed.items()}}
        return [word for flag, values in now.items() for word in (flag, *values)] + self.added

    @property
    def added(self) -> list[str]:
        """What it got in addition."""
        no_biases = "--num-experts" in self.kept | self.changed and "--disable-bias-linear" not in self.kept
        return [*ADDED, *(["--disable-bias-linear"] if no_biases else [])]

    @property
    def layout(self) -> dict[str, int]:
        """Degrees of parallelism."""
        names = {"TP": "tensor-model", "PP": "pipeline-model", "EP": "expert-model"}
        return {short: int(self.value(f"--{name}-parallel-size", "1")) for short, name in names.items()}

    @property
    def inner_data(self) -> int:
        """Data-parallel ranks of a group: as few as the experts allow."""
        tensor, expert = self.layout["TP"], self.layout["EP"]
        expert *= int(self.value("--expert-tensor-parallel-size", str(tensor)))
        return max(1, expert // tensor)

    @property
    def group_size(self) -> int:
        """Ranks of a group."""
        return self.layout["TP"] * self.layout["PP"] * self.inner_data

    def value(self, flag: str, default: str = "") -> str:
        """The value that a flag has now."""
        if flag in self.changed:
            return self.changed[flag][1][0]
        return self.kept[flag][0] if flag in self.kept else default

    def change(self, flag: str, value: int) -> None:
        """Give a flag that is there another value."""
        there = self.kept.pop(flag) if flag in self.kept else self.changed[flag][0]
        self.changed[flag] = (there, (str(value),))


def shrink(words: Sequence[str]) -> Shrunk:
    """The configuration of a command line, made small by ``RULES``."""
    rules = {flag: rule for rule in RULES for flag in rule.flags}
    shrunk = Shrunk()
    for flag, values in _flags(words):
        new = rules[flag].apply(values) if flag in rules else values
        if new is None:
            shrunk.dropped[flag] = values
        elif new == values:
            shrunk.kept[flag] = values
        else:
            shrunk.changed[flag] = (values, new)
    _fit(shrunk)
    return shrunk


def _flags(words: Sequence[str]) -> Iterator[tuple[str, Values]]:
    starts = [n for n, word in enumerate(words) if word.startswith("--")]
    for start, end in zip(starts, [*starts[1:], len(words)], strict=True):
        yield words[start], tuple(words[start + 1 : end])


def _fit(shrunk: Shrunk) -> None:
    """Change what depends on several flags."""
    if shrunk.group_size > GROUP_MAX:
        shrunk.change("--tensor-model-parallel-size", 1)
    if int(shrunk.value("--expert-tensor-parallel-size", "1")) > shrunk.layout["TP"]:
        shrunk.change("--expert-tensor-parallel-size", shrunk.layout["TP"])
    if "--account-for-loss-in-pipeline-split" in shrunk.kept:  # with the embedding, two of the four
        shrunk.change("--num-layers", LAYERS - 2)
    if "--moe-layer-freq" in shrunk.changed and shrunk.value("--num-layers") != str(LAYERS):
        shrunk.change("--num-layers", LAYERS)
    batch = shrunk.value("--global-batch-size")
    ranks = GROUPS * shrunk.inner_data
    if batch and int(batch) < ranks * int(shrunk.value("--micro-batch-size")):
        shrunk.change("--micro-batch-size", int(batch) // ranks)
