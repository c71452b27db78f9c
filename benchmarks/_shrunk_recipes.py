"""Draws published recipes (tests/data/recipes) and makes them so small that a machine without GPU trains them.

The rules of ``_shrinking_rules.py`` hold, but for the flags that have one here. A seed decides what the rules leave
open: which recipes are drawn, which of TP, PP and EP a recipe keeps (a group has two ranks at most), and which of the
drawn recipes get a feature that no recipe asks for.
"""

from __future__ import annotations

import contextlib
import io
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks._shrinking_rules import LAYERS, LAYOUT, WARM_UP_STEPS, Rule
from benchmarks._shrunk_flags import Shrunk, shrink
from benchmarks.recipes import FOLDER, of_mainline
from tests.pure.functional_sets import answer

DEGREES = {
    "TP": "--tensor-model-parallel-size",
    "PP": "--pipeline-model-parallel-size",
    "EP": "--expert-model-parallel-size",
}
VIRTUAL = ("--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank", LAYOUT)
UNEVEN_STAGES = (
    *("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"),
    *("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"),
)
"""Flags that only a job with pipeline stages has; 4 layers are not divided unevenly over virtual stages."""
MORE_RULES = (
    Rule(
        "the recipes' rates are those of the first of thousands of steps; a small model must learn something in 10",
        ("--lr",),
        value="2e-3",
    ),
    Rule("as --lr", ("--min-lr",), value="2e-4"),
    Rule("as --lr", ("--lr-warmup-init",), value="1e-4"),
    Rule("the 10 steps go through warm-up and decay", ("--lr-warmup-iters",), at_most=WARM_UP_STEPS),
    Rule("as --lr-warmup-iters", ("--lr-wsd-decay-iters",), value=str(WARM_UP_STEPS)),
    Rule("10 steps of 32 samples", ("--train-samples", "--lr-decay-samples"), value="320"),
    Rule("the plain job reads the samples in the order of a single pass", ("--dataloader-type",), value="single"),
    Rule(
        "its random numbers are keyed by the piece here, and drawn one after another in Megatron",
        ("--moe-router-force-load-balancing",),
    ),
    Rule("a batch of one size", ("--rampup-batch-size",)),
    Rule("small latent attention", ("--q-lora-rank",), value="32"),
    Rule("as --q-lora-rank", ("--kv-lora-rank", "--qk-head-dim", "--v-head-dim"), value="16"),
    Rule("as --q-lora-rank", ("--qk-pos-emb-head-dim",), value="8"),
    Rule("as there", ("--multi-latent-attention",), stays=True),
    Rule("fewer groups of experts, as there are fewer experts", ("--moe-router-num-groups",), value="2"),
    Rule("as --moe-router-num-groups", ("--moe-router-group-topk",), value="1"),
    Rule("plain megatron-core has no AdEMAMix", ("--optimizer",), value="adam"),
    Rule(
        "as --optimizer",
        ("--ademamix-alpha", "--ademamix-beta3", "--ademamix-alpha-warmup", "--ademamix-beta3-warmup"),
    ),
    Rule("no transformer-engine", ("--cross-entropy-fusion-impl",), value="native"),
    Rule(
        "no transformer-engine, so no fp8",
        (
            *("--fp8-margin", "--fp8-interval", "--fp8-amax-history-len", "--fp8-amax-compute-algo"),
            *("--moe-router-padding-for-fp8", "--moe-router-padding-for-quantization"),
            *("--use-precision-aware-optimizer", "--exp-avg-dtype", "--exp-avg-sq-dtype"),
            "--reuse-grad-buf-for-mxfp8-param-ag",
        ),
    ),
    Rule("megatron-core 0.19 no longer has it", ("--moe-use-legacy-grouped-gemm",)),
    Rule("no mamba-ssm", ("--hybrid-override-pattern",), value="*E*E"),
    Rule(
        "a job that starts anew and saves nothing",
        ("--use-checkpoint-args", "--exit-on-missing-checkpoint", "--no-load-rng", "--no-initialization"),
    ),
)
"""Each flag is in one rule; those that ``RULES`` have too are ruled here."""


@dataclass(frozen=True)
class Feature:
    """What recipes are given in addition: flags in place of others. ``fits`` says to which recipes."""

    name: str
    recipes: int
    given: tuple[str, ...]
    fits: Callable[[Shrunk], bool]
    in_place_of: tuple[str, ...] = ()


def _any(small: Shrunk) -> bool:
    return "--fp16" not in small.kept


def _dense(small: Shrunk) -> bool:
    return not small.value("--num-experts") and small.layout["PP"] == 1 and "--fp16" not in small.kept


def _sparse(small: Shrunk) -> bool:
    return bool(small.value("--num-experts")) and small.layout["PP"] == 1 and not small.value("--mtp-num-layers")


_LAYERS = ("--num-layers", "--moe-layer-freq", "--multi-latent-attention", "--use-rope-scaling")
FEATURES = (
    Feature("Muon", 2, ("--optimizer", "muon", "--muon-momentum", "0.95"), _any, in_place_of=("--optimizer",)),
    Feature("Lion", 1, ("--optimizer", "lion"), _any, in_place_of=("--optimizer",)),
    Feature("SOAP", 2, ("--optimizer", "soap"), _any, in_place_of=("--optimizer",)),
    Feature("muP", 2, ("--use-mup", "--mup-base-hidden-size", "32"), _any),
    Feature("hybrid", 1, ("--hybrid-layer-pattern", "*-*-"), _dense, _LAYERS),
    Feature("hybrid", 1, ("--hybrid-layer-pattern", "*-*E"), _sparse, _LAYERS),
)
ASKED_FOR = {
    "MTP": "--mtp-num-layers",
    "hybrid": "--hybrid-override-pattern",
    "offload": "--optimizer-cpu-offload",
}
"""Features that recipes ask for themselves -> the flag."""


def accepted_recipes() -> list[str]:
    """Names of the recipes that --spare-check takes with this megatron-core, after flags of forks are taken out."""
    with contextlib.redirect_stdout(io.StringIO()):
        reported = {path.stem: answer(of_mainline(path.read_text().splitlines())[0]) for path in FOLDER.glob("*.args")}
    return sorted(name for name, one in reported.items() if not one)


def drawn_recipes(accepted: Sequence[str], count: int, seed: int) -> dict[str, Shrunk]:
    """``count`` of the ``accepted`` recipes, made small: smallest groups first, among those of a size the ones with a
    feature. Their names say what they were given.

    ``accepted``: names of files in tests/data/recipes, without their ending.
    """
    generator = random.Random(seed)
    found: dict[str, Shrunk] = {}
    for name in generator.sample(sorted(accepted), count):
        words, _ = of_mainline((FOLDER / f"{name}.args").read_text().splitlines())
        found[name] = shrink_recipe(words, generator)
    free = list(found)
    for feature in FEATURES:
        able = [name for name in free if feature.fits(found[name])]
        for name in generator.sample(able, min(feature.recipes, len(able))):
            free.remove(name)
            found[f"{name} with {feature.name}"] = give(found.pop(name), feature)
    return dict(sorted(found.items(), key=lambda one: (one[1].group_size, not features_of(one[1]), one[0])))


def shrink_recipe(words: Sequence[str], generator: random.Random) -> Shrunk:
    """A recipe made small, with two ranks in a group, or one if it splits nothing."""
    small = shrink(words, MORE_RULES)
    split = [name for name, degree in small.layout.items() if degree > 1]
    kept = generator.choice(split) if split else ""
    for name in split:
        if name != kept:
            small.change(DEGREES[name], 1)
    if kept != "TP" and small.value("--expert-tensor-parallel-size"):
        small.change("--expert-tensor-parallel-size", 1)
    virtual = [flag for flag in VIRTUAL if small.value(flag)]
    if not small.value("--eval-iters"):
        small.given += ("--eval-iters", "0")
    if "--qk-layernorm" in small.kept and "--multi-latent-attention" in small.kept and not small.value("--q-lora-rank"):
        small.given += ("--q-lora-rank", "32")  # which megatron-core's local layers need for that norm since 0.19
    if "--fp16" in small.kept:  # the rates are higher here, and so are the gradients
        small.given += ("--initial-loss-scale", "4096")
    for flag in (*VIRTUAL, *UNEVEN_STAGES) if kept != "PP" else UNEVEN_STAGES if virtual else ():
        small.drop(flag)
    if "--num-layers" in small.changed and "--account-for-loss-in-pipeline-split" not in small.kept:
        small.change("--num-layers", LAYERS)
    return small


def features_of(small: Shrunk) -> list[str]:
    """Which features of :data:`ASKED_FOR` and :data:`FEATURES` a recipe has."""
    words = set(small.words)
    return [name for name, flag in ASKED_FOR.items() if flag in words and flag not in small.given] + sorted(
        {feature.name for feature in FEATURES if set(feature.given) <= set(small.given)}
    )


def give(small: Shrunk, feature: Feature) -> Shrunk:
    """The same with ``feature``."""
    for flag in feature.in_place_of:
        small.drop(flag)
    small.given = (*small.given, *feature.given)
    return small
