"""Reads ``--hybrid-layer-pattern``, the layers of megatron-core's HybridModel, without importing megatron-core.

Each layer of the main part is one symbol of :data:`LAYERS`. ``|`` ends a pipeline stage; without any, layers are
divided evenly. Each part behind a ``/`` has the layers that predict one more token (multi-token prediction); these
parts are equal. A test compares the two readers where megatron-core has one.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.flags import flag_name
from spare_megatron.config.plural import counted

FLAG = "--hybrid-layer-pattern"
CORE = (0, 19)
"""The first megatron-core whose HybridModel has been run; 0.18 has the class too."""
MAMBA, GATED, ATTENTION, LATENT, SPARSE, DENSE, EXPERTS = "MG*+D-E"
LAYERS = {
    MAMBA: "Mamba",
    GATED: "gated delta net",
    ATTENTION: "attention",
    LATENT: "multi-latent attention",
    SPARSE: "sparse attention",
    DENSE: "feed-forward",
    EXPERTS: "experts",
}
OF_ENGINE = MAMBA + GATED
"""Layers that megatron-core builds of transformer-engine's modules only, with packages of their own. They are taken as
they come: the tests have not run them."""
_OTHER_LAYOUTS = {
    "num_layers_per_virtual_pipeline_stage": None,
    "num_virtual_stages_per_pipeline_rank": None,
    "pipeline_model_parallel_layout": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
}
_RATIOS = {"hybrid_attention_ratio": "--hybrid-attention-ratio", "hybrid_mlp_ratio": "--hybrid-mlp-ratio"}
_ENDS = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")


@dataclass(frozen=True)
class HybridPattern:
    """The layers of a hybrid model."""

    stages: tuple[str, ...]
    """The main layers of each part between two ``|``, a word of :data:`LAYERS` each."""
    predicting: str = ""
    """The layers that predict one more token."""
    predicted: int = 0
    """How many more tokens are predicted."""

    @property
    def main(self) -> str:
        """The main layers."""
        return "".join(self.stages)

    def count(self, symbols: str, predicting: bool = True) -> int:
        """How many layers of these symbols there are, with those that predict more tokens or without."""
        layers = self.main + (self.predicting * self.predicted if predicting else "")
        return sum(layers.count(symbol) for symbol in symbols)


def read_pattern(text: str) -> HybridPattern:
    """The layers that ``text`` names; ConfigError where it cannot be read."""
    main, *predicting = text.split("/")
    strange = sorted(set(text) - {*LAYERS, "|", "/"}) or ["|"] * ("|" in "".join(predicting))
    if strange:
        known = ", ".join(f"{symbol} ({name})" for symbol, name in LAYERS.items())
        raise ConfigError(
            f"{FLAG} {text!r} has {' '.join(map(repr, strange))}; layers are {known}; | ends a pipeline stage, and "
            "each / begins the layers of one more predicted token, in which there is no |"
        )
    if not main.replace("|", ""):
        raise ConfigError(f"{FLAG} {text!r} has no layers; give them as in '*-*-', attention and feed-forward in turn")
    if not any(predicting):
        return HybridPattern(tuple(main.split("|")))
    if len(set(predicting)) > 1:
        raise ConfigError(
            f"{FLAG} {text!r} predicts tokens by different layers, {' and '.join(map(repr, predicting))}; "
            "megatron-core takes equal ones only"
        )
    return HybridPattern(tuple(main.split("|")), predicting[0], len(predicting))


def pattern_of(ns: Namespace) -> HybridPattern | None:
    """The pattern of resolved flags; None where the model is a GPT."""
    return None if ns.hybrid_layer_pattern is None else read_pattern(ns.hybrid_layer_pattern)


def resolve_hybrid(ns: Namespace) -> None:
    """Bring older forms of the pattern into today's, and derive what Megatron derives from it: the number of layers,
    that of predicted tokens, and multi-latent attention. Raises ConfigError where flags contradict one another."""
    if ns.hybrid_override_pattern is not None:
        if ns.hybrid_layer_pattern not in (None, ns.hybrid_override_pattern):
            raise ConfigError(f"--hybrid-override-pattern is the older name of {FLAG}; give one of them")
        ns.hybrid_layer_pattern = ns.hybrid_override_pattern
    _resolve_older_prediction(ns)
    ratios = [flag for name, flag in _RATIOS.items() if getattr(ns, name)]
    if ratios and ns.hybrid_layer_pattern is None:
        raise ConfigError(
            f"{' and '.join(ratios)} without {FLAG} says how many layers of each kind a hybrid model has; write them "
            "out, as megatron-core asks for since 0.18, as in 'M-M*-M-'"
        )
    if ratios:
        ns.spare_notes += (f"{' and '.join(ratios)}: the layers are those of {FLAG}",)
    if ns.hybrid_layer_pattern is None:
        for given, flag in ((ns.is_hybrid_model, "--is-hybrid-model"), (ns.spec, "--spec")):
            if given:
                raise ConfigError(
                    f"{flag} is taken for hybrid models only; write out the layers with {FLAG}, as in '*-*-'"
                )
        return
    pattern = read_pattern(ns.hybrid_layer_pattern)
    layers = len(pattern.main)
    for name in ("num_layers", "encoder_num_layers"):
        if getattr(ns, name) not in (None, layers):
            flag = f"{flag_name(name)} {getattr(ns, name)}"
            ns.spare_notes += (f"{flag}: the {counted(layers, 'layer')} of {FLAG} count, as in Megatron",)
        setattr(ns, name, layers)
    if (ns.mtp_num_layers or 0) != pattern.predicted:
        if not pattern.predicted:
            raise ConfigError(
                f"--mtp-num-layers {ns.mtp_num_layers} needs the layers that predict tokens in {FLAG}, behind a / for "
                f"each, as in '{ns.hybrid_layer_pattern}{'/*-' * min(ns.mtp_num_layers, 3)}'"
            )
        if ns.mtp_num_layers is not None:
            ns.spare_notes += (
                f"--mtp-num-layers {ns.mtp_num_layers}: the {pattern.predicted} of {FLAG} count, as in Megatron",
            )
        ns.mtp_num_layers = pattern.predicted
    ns.is_hybrid_model = True
    ns.multi_latent_attention |= pattern.count(LATENT + SPARSE) > 0


def _resolve_older_prediction(ns: Namespace) -> None:
    older = ns.mtp_hybrid_override_pattern
    if older is None:
        return
    if ns.hybrid_layer_pattern is None or "/" in ns.hybrid_layer_pattern or not ns.mtp_num_layers:
        raise ConfigError(
            f"--mtp-hybrid-override-pattern {older} is an older form of parts behind / in {FLAG}, and needs that flag "
            f"without such parts, and --mtp-num-layers; write '/{older}' into {FLAG} once for each token instead"
        )
    ns.hybrid_layer_pattern += f"/{older}" * ns.mtp_num_layers
    ns.mtp_hybrid_override_pattern = None


def hybrid_chunks(ns: Namespace) -> int:
    """The number of model chunks of each pipeline rank, from the pattern's stages; a note says what each rank builds.
    ConfigError where the pattern does not fit the pipeline, or another flag divides layers too."""
    pattern, pipeline = read_pattern(ns.hybrid_layer_pattern), ns.pipeline_model_parallel_size
    piped = len(pattern.stages) > 1
    others = [name for name, default in _OTHER_LAYOUTS.items() if getattr(ns, name) != default]
    others += [name for name in _ENDS if piped and getattr(ns, name) is not None]
    if others:
        flags = " and ".join(flag_name(name) for name in others)
        raise ConfigError(f"{flags} does not go with {FLAG}: its | say where pipeline stages end; leave it out")
    if len(pattern.stages) % pipeline and piped:
        nearest = max(1, round(len(pattern.stages) / pipeline)) * pipeline
        raise ConfigError(
            f"{FLAG} has {counted(len(pattern.stages), 'stage')}, not a multiple of --pipeline-model-parallel-size "
            f"{pipeline}; use {nearest} stages"
        )
    stages = pattern.stages if piped else divided(pattern.main, pipeline, *(getattr(ns, name) for name in _ENDS))
    ns.spare_notes += (f"{FLAG}: {hybrid_text(stages, pipeline, pattern)}",)
    return int(len(stages) // pipeline)


def divided(layers: str, pipeline: int, first: int | None = None, last: int | None = None) -> tuple[str, ...]:
    """The layers of each of ``pipeline`` stages where no ``|`` says so: evenly, but for as many on the ``first`` and
    the ``last`` stage as flags ask for. ConfigError where that leaves a remainder."""
    ends = [one for one in (first, last) if one is not None]
    between, left = pipeline - len(ends), len(layers) - sum(ends)
    if left < 0 or (left % between if between else left):
        raise ConfigError(
            f"the {counted(len(layers), 'layer')} of {FLAG} cannot be divided over --pipeline-model-parallel-size "
            f"{pipeline}" + (f" with {sum(ends)} on its ends" if ends else "") + "; mark the end of each stage by |"
        )
    each = left // between if between else 0
    sizes = [*([] if first is None else [first]), *[each] * between, *([] if last is None else [last])]
    starts = [sum(sizes[:n]) for n in range(pipeline)]
    return tuple(layers[start : start + size] for start, size in zip(starts, sizes, strict=True))


def hybrid_text(stages: tuple[str, ...], pipeline: int, pattern: HybridPattern) -> str:
    """What each rank of a pipeline builds: '2 stages on each of 2 ranks; layers of the stages: *-*-, 3 x *E'."""
    runs = [(stage, len(list(same))) for stage, same in groupby(stages)]
    shown = ", ".join(f"{stage or 'none'}" if count == 1 else f"{count} x {stage or 'none'}" for stage, count in runs)
    more = f", and {pattern.predicting} for each of {counted(pattern.predicted, 'more predicted token')}"
    each = f"{counted(len(stages) // pipeline, 'stage')} on each of {counted(pipeline, 'rank')}"
    return f"{each}; layers of the stages: {shown}" + (more if pattern.predicted else "")


def check_hybrid(ns: Namespace) -> None:
    """ConfigError for layers that cannot be built with the other flags. Assumes a resolved namespace."""
    pattern = pattern_of(ns)
    if pattern is None:
        return
    if pattern.count(SPARSE):
        raise ConfigError(
            f"{FLAG} has sparse attention (D), which is not supported: it needs its indexer's loss in the schedule and "
            "a run on GPUs that shows it right; use * or +"
        )
    if pattern.count(ATTENTION) and pattern.count(LATENT):
        raise ConfigError(f"{FLAG} has attention of two kinds, * and +, which megatron-core refuses; use one of them")
    if pattern.count(EXPERTS) and ns.num_experts is None:
        raise ConfigError(f"{FLAG} has layers with experts (E); say how many there are, as in --num-experts 8")
    if ns.use_rope_scaling:
        raise ConfigError(f"--use-rope-scaling does not go with {FLAG}: HybridModel cannot scale so; leave it out")


def layers_text(symbol: str) -> str:
    """'Mamba layers (M) of --hybrid-layer-pattern'."""
    return f"{LAYERS[symbol]} layers ({symbol}) of {FLAG}"


def packages(pattern: HybridPattern) -> Iterator[tuple[str, str, str]]:
    """(symbol of layers of the pattern, the module that they import, the package that has it)."""
    for symbol, module, package in (
        (MAMBA, "mamba_ssm", "mamba-ssm"),
        (MAMBA, "einops", "einops"),
        (GATED, "fla", "flash-linear-attention"),
    ):
        if pattern.count(symbol):
            yield symbol, module, package
