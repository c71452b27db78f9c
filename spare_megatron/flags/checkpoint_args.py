"""``--use-checkpoint-args``: takes flags of the model from the args with which the checkpoint of ``--load`` was saved.

Which flags are taken, and which value counts where the command line has another one:

- ``SIZES``: the checkpoint's. Another value on the command line is refused, because these weights cannot have it.
- ``MODEL``, other flags that define what the weights compute: the checkpoint's, and a note names both values.
- ``COMMAND_LINE``, flags that may change between trainings of the same weights: the command line's, with a note.
- ``TOKENIZER``, unless ``--no-use-tokenizer-model-from-checkpoint-args`` is given: the checkpoint's.
- ``PARALLEL``, only with ``--use-mp-args-from-checkpoint-args``: the checkpoint's.

Megatron-LM's ``load_args_from_checkpoint`` does the same, with two differences. Other sizes fail there only when
weights are loaded. And it does not take ``BEYOND_MEGATRON`` and the second half of ``COMMAND_LINE``, without which a
checkpoint of Qwen3, of Llama 3 or with multi-latent attention silently becomes another model. All other flags
(precision, optimizer, data, coefficients of losses) are the command line's. Imports neither torch nor megatron.
"""

from __future__ import annotations

import math
import re
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spare_megatron.config.errors import ConfigError
from spare_megatron.flags.refusals import refused_names
from spare_megatron.flags.resolve import pattern, window
from spare_megatron.flags.specs import FlagSpec, megatron_table
from spare_megatron.flags.supported import all_specs

SavedArgs = Callable[[Path, int | None], tuple[Path, dict[str, Any]] | None]
"""Function from a ``--load`` directory and a step (None: the newest) to the checkpoint's directory and args, or None
where there is no checkpoint; ``checkpoint.saved_args.saved_args`` is one."""

FLAG, PARALLEL_FLAG = "--use-checkpoint-args", "--use-mp-args-from-checkpoint-args"

SIZES = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels")
BEYOND_MEGATRON = (
    *("qk_layernorm", "qk_l2_norm", "quick_geglu", "softmax_type", "attention_output_gate"),
    *("apply_residual_connection_post_layernorm", "layernorm_zero_centered_gamma"),
    *("glu_linear_offset", "activation_func_clamp_value"),
    *("multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
    "mtp_num_layers",
    *("experimental_attention_variant", "linear_attention_freq", "linear_conv_kernel_dim", "linear_key_head_dim"),
    *("linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads"),
    *("moe_shared_expert_gate", "moe_router_num_groups", "moe_router_group_topk", "moe_apply_probs_on_input"),
)
PATTERN = "hybrid_layer_pattern"
"""Taken from a checkpoint of a hybrid model; with one of a GPT it is the command line's, as GPTs load into hybrid
models."""
MODEL = (
    *("num_query_groups", "group_query_attention", "position_embedding_type", "add_position_embedding"),
    *("use_rotary_position_embeddings", "rotary_base", "rotary_percent", "rotary_interleaved"),
    *("add_bias_linear", "add_qkv_bias", "squared_relu", "swiglu", "untie_embeddings_and_output_weights"),
    *("normalization", "apply_query_key_layer_scaling", "attention_dropout", "hidden_dropout"),
    *("num_experts", "moe_layer_freq", "moe_ffn_hidden_size", "moe_router_topk", "moe_router_pre_softmax"),
    *("moe_grouped_gemm", "moe_shared_expert_intermediate_size", "moe_router_score_function"),
    *("moe_router_enable_expert_bias", "moe_router_topk_scaling_factor", "moe_latent_size"),
    *("mamba_state_dim", "mamba_head_dim", "mamba_num_groups", "mamba_num_heads"),
    *BEYOND_MEGATRON,
)
COMMAND_LINE = (
    *("seq_length", "max_position_embeddings", "padded_vocab_size"),
    # Megatron leaves these to the command line
    *("layernorm_epsilon", "bias_gelu_fusion", "use_rope_scaling", "rope_scaling_factor", "rope_type"),
    *("rotary_seq_len_interpolation_factor", "rotary_scaling_factor", "mscale", "mscale_all_dim"),
    *("no_rope_freq", "window_size", "window_attn_skip_freq"),
    *("yarn_original_max_position_embeddings", "yarn_beta_fast", "yarn_beta_slow"),
    "yarn_correction_range_round_to_int",
)
TOKENIZER = ("tokenizer_model", "tokenizer_type")
TOKENIZER_PATTERN = "tiktoken_pattern"
PARALLEL = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
CHUNKS = "num_layers_per_virtual_pipeline_stage"

SAME_SHAPES: dict[str, tuple[str, ...]] = {
    "": (
        *("position_embedding_type", "normalization", "layernorm_epsilon", "layernorm_zero_centered_gamma"),
        *("add_bias_linear", "swiglu", "squared_relu", "quick_geglu", "glu_linear_offset"),
        *("activation_func_clamp_value", "qk_layernorm", "qk_l2_norm", "softmax_type", "attention_output_gate"),
        *("apply_residual_connection_post_layernorm", "untie_embeddings_and_output_weights"),
    ),
    "rotary": ("rotary_base", "rotary_percent", "rotary_interleaved", "use_rope_scaling", "rope_scaling_factor"),
    "experts": (
        *("moe_router_topk", "moe_router_score_function", "moe_router_pre_softmax", "moe_router_topk_scaling_factor"),
        *("moe_router_num_groups", "moe_router_group_topk", "moe_apply_probs_on_input", "moe_shared_expert_gate"),
    ),
}
"""Flags that change what weights of the same shapes compute, or leave some of them out, for models of a kind."""
COMPARED_SIZES = ("num_layers", "hidden_size", "num_attention_heads", "kv_channels")

# what Megatron takes as well, and this framework refuses: set in the args of a model that cannot be trained here
UNSUPPORTED = (*("heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json"),)
_OLD_NAMES = {
    "layernorm_epsilon": "norm_epsilon",
    "layernorm_zero_centered_gamma": "apply_layernorm_1p",
    PATTERN: "hybrid_override_pattern",
}
_SAME = {"num_layers": "encoder_num_layers", "seq_length": "encoder_seq_length"}
_PATTERNS = ("moe_layer_freq", "no_rope_freq", "window_attn_skip_freq", "linear_attention_freq")


@dataclass
class Taken:
    """The flags that a job took from a checkpoint."""

    where: Path
    """Directory of the checkpoint, or the ``--load`` directory where that has none."""
    found: bool = True
    values: dict[str, Any] = field(default_factory=dict)
    """Destination -> value of the flags whose value the checkpoint changed."""
    differences: list[str] = field(default_factory=list)
    """A sentence for each flag that was given with a value other than the checkpoint's."""

    def sentences(self) -> tuple[str, ...]:
        """The sentences that are printed once, when the job starts."""
        if not self.found:
            return (f"{FLAG}: --load {self.where} has no checkpoint, so all flags are the command line's",)
        shown = ", ".join(f"{name} {value}" for name, value in self.values.items())
        return (f"{FLAG}: {shown or 'nothing that differs'}, from {self.where}", *self.differences)


@contextmanager
def explained(taken: Taken | None) -> Iterator[None]:
    """Add to a ConfigError that a flag it names was taken from the checkpoint, or that a missing flag could not be
    taken because there is no checkpoint."""
    try:
        yield
    except ConfigError as error:
        if taken is None:
            raise
        named = re.findall(r"--[a-z0-9-]+", str(error))
        flags = [_flag(name) for name in taken.values if _flag(name) in named]
        if not taken.found and " is missing" in str(error):
            raise ConfigError(f"{error} ({FLAG} found no checkpoint in --load {taken.where})") from error
        if not flags:
            raise
        raise ConfigError(f"{error} ({FLAG} took {' and '.join(flags)} from {taken.where})") from error


def no_checkpoint(_load: Path, _step: int | None) -> None:
    """A :data:`SavedArgs` that finds no checkpoint, for callers that must not read files."""


def take(ns: Namespace, saved: SavedArgs, default: bool = False) -> Taken | None:
    """Set flags in a parsed namespace from the args of its checkpoint; None where none are to be taken.

    ``default`` says whether they are taken without the flag. ``ns.spare_given`` has the flags that the user gave.

    Raises:
        ConfigError: there is no ``--load``, its checkpoint has no args, they are of a model that is not supported, or
            they contradict a size on the command line.
    """
    if not (ns.use_checkpoint_args or default):
        if ns.use_mp_args_from_checkpoint_args:
            raise ConfigError(f"{PARALLEL_FLAG} is only for {FLAG}; add it or leave both out")
        return None
    found = _found(saved, ns.load, ns.ckpt_step)
    if found is None:
        elsewhere = ns.spare_check and not Path(ns.load).exists()  # the check lists what another machine has
        if ns.exit_on_missing_checkpoint and not elsewhere:
            raise ConfigError(f"--load {ns.load}: it has no checkpoint; give a directory with a checkpoint")
        return Taken(Path(ns.load), found=False)
    taken = Taken(found[0])
    _refuse_unsupported(ns, *found)
    _Reader(ns, found[1], taken).read()
    return taken


def degrees(ns: Namespace, saved: SavedArgs) -> dict[str, int]:
    """The parallel degrees that a command line takes from a checkpoint, by their names in the namespace.

    Launchers need them, because they must know the number of ranks of a group before any rank reads flags. ConfigError
    in the cases of :func:`take`.
    """
    found = _found(saved, ns.load, ns.ckpt_step) if ns.use_mp_args_from_checkpoint_args else None
    if found is None:
        return {}
    values = {name: _checked(name, found[1].get(name), found[0]) for name in PARALLEL}
    return {name: value for name, value in values.items() if value is not None}


def _found(saved: SavedArgs, load: str | None, step: int | None) -> tuple[Path, Mapping[str, Any]] | None:
    """The checkpoint's directory and its args under the names of today's flags; None where there is no checkpoint."""
    if load is None:
        raise ConfigError(f"{FLAG} needs --load, the directory of the checkpoint whose args are taken; give it")
    found = saved(Path(load), step)
    if found is None:
        return None
    directory, args = found
    if all(args.get(name) is None for name in SIZES):
        raise ConfigError(
            f"{FLAG}: the checkpoint in {directory} was saved without args, so its model is not known; "
            f"leave {FLAG} out and give the model's flags"
        )
    if "disable_bias_linear" in args:
        args["add_bias_linear"] = not args["disable_bias_linear"]
    return directory, {**{new: args[old] for new, old in _OLD_NAMES.items() if old in args}, **args}


class _Reader:
    """Reads a checkpoint's args into a namespace and notes what was taken."""

    def __init__(self, ns: Namespace, args: Mapping[str, Any], taken: Taken) -> None:
        self._ns, self._args, self._taken = ns, args, taken
        for name, other in _SAME.items():  # two names of one thing
            if getattr(ns, name) is None:
                setattr(ns, name, getattr(ns, other))

    def read(self) -> None:
        """Take all flags that the module's docstring lists."""
        ns = self._ns
        self._counts(PATTERN)
        for name in MODEL:
            self._model(name)
        table = ns.position_embedding_type == "learned_absolute" and not ns.use_rotary_position_embeddings
        for name in (*SIZES, "max_position_embeddings") if table else SIZES:
            self._size(name)
        for name in COMMAND_LINE:
            self._from_either(name)
        for name in TOKENIZER if ns.use_tokenizer_model_from_checkpoint_args else ():
            self._counts(name)
        self._counts(TOKENIZER_PATTERN)
        if ns.use_mp_args_from_checkpoint_args:
            for name in PARALLEL:
                self._counts(name)
            if ns.num_virtual_stages_per_pipeline_rank is None and ns.pipeline_model_parallel_layout is None:
                self._from_either(CHUNKS)

    def _model(self, name: str) -> None:
        """Take a flag of ``MODEL``. None is a value for flags that are None by default: no experts, no factor."""
        if name in self._args and (self._args[name] is not None or _spec(name).default is None):
            self._set(name, _checked(name, self._args[name], self._taken.where))

    def _counts(self, name: str) -> None:
        if self._args.get(name) is not None:
            self._set(name, _checked(name, self._args[name], self._taken.where))

    def _size(self, name: str) -> None:
        value = _checked(name, self._args.get(name), self._taken.where)
        now = getattr(self._ns, name)
        if value is not None and now is not None and now != value:
            raise ConfigError(
                f"{_flag(name)} {now} is given, but with {FLAG} the model of {self._taken.where} counts, which has "
                f"{value}; leave {_flag(name)} out"
            )
        self._counts(name)

    def _from_either(self, name: str) -> None:
        value = _checked(name, self._args.get(name), self._taken.where)
        if value is None:
            return
        if not self._given(name):
            self._set(name, value)
        elif _normal(name, getattr(self._ns, name)) != value:
            self._differs(name, value, "the command line's")

    def _set(self, name: str, value: Any) -> None:
        if _normal(name, getattr(self._ns, name)) == value:
            return
        if self._given(name):
            self._differs(name, value, "the checkpoint's")
        setattr(self._ns, name, value)
        self._taken.values[name] = value

    def _given(self, name: str) -> bool:
        names = {*_spec(name).names, *(_spec(_SAME[name]).names if name in _SAME else ())}
        return not names.isdisjoint(self._ns.spare_given)

    def _differs(self, name: str, value: Any, whose: str) -> None:
        switch = _spec(name).kind in ("on", "off")
        reported = _flag(name) if switch else f"{_flag(name)} {getattr(self._ns, name)}"
        how = "without it" if switch or value is None else f"with {value}"
        self._taken.differences.append(f"{reported} is given, but {self._taken.where} was saved {how}: {whose} counts")


def other_sizes(ns: Namespace, args: Mapping[str, Any], where: Path) -> str:
    """How the job's model has other sizes than that of the checkpoint in ``where``, whose ``args`` were saved; empty
    where it has not. Other heads have weights of the same shapes, and other layers may leave some of them out."""
    apart = (ns.hybrid_layer_pattern is None) == bool(args.get(PATTERN) or args.get(_OLD_NAMES[PATTERN]))
    for name, saved, now in _differences(ns, args, COMPARED_SIZES):
        if name != "num_layers" or not apart:  # GPTs load into hybrid models, and these are refused by GPTs elsewhere
            return (
                f"{where} is of a model with {_flag(name)} {saved}, but this job's has {now}, with which these weights "
                f"would compute something else; use {_flag(name)} {saved}, or {FLAG}"
            )
    return ""


def other_rows(ns: Namespace, args: Mapping[str, Any], where: Path) -> str:
    """What follows where the vocabulary has another number of rows than in the checkpoint in ``where``; empty where it
    has not. The number depends on the tensor-parallel size, and softmax counts rows that no token has."""
    saved, now = args.get("padded_vocab_size"), ns.padded_vocab_size
    if type(saved) is not int or type(now) is not int or saved == now:
        return ""
    what = f"{now - saved} more have new weights" if now > saved else f"the last {saved - now} are left out"
    fits = saved >= ns.spare_vocabulary_ids and saved % ns.tensor_model_parallel_size == 0
    return f"{where} has {saved} rows of the vocabulary, and this job's model {now}: {what}, so the loss is another" + (
        f"; --padded-vocab-size {saved} goes on with those of the checkpoint" if fits else ""
    )


def other_model(ns: Namespace, args: Mapping[str, Any]) -> list[str]:
    """The flags by which the same weights compute something else in this job than in that of the checkpoint, with both
    values."""
    kinds = {
        "": True,
        "rotary": ns.position_embedding_type in ("rope", "yarn"),
        "experts": ns.num_experts is not None,
    }
    names = [name for kind, names in SAME_SHAPES.items() if kinds[kind] for name in names]
    return [f"{name} {saved}, here {now}" for name, saved, now in _differences(ns, args, names)]


def _differences(ns: Namespace, args: Mapping[str, Any], names: Sequence[str]) -> Iterator[tuple[str, Any, Any]]:
    """(name, the checkpoint's value, this job's) of flags that differ; one that the args do not have is not known."""
    for name in names:
        saved, now = args.get(name, args.get(_OLD_NAMES.get(name, name))), getattr(ns, name)
        known = type(saved) in (bool, int, float, str) or (saved is None and name in args)
        if known and (saved or None) != (now or None):
            yield name, saved, now


def _refuse_unsupported(ns: Namespace, where: Path, args: Mapping[str, Any]) -> None:
    shares = [name for name in ("is_hybrid_model", "hybrid_attention_ratio", "hybrid_mlp_ratio") if args.get(name)]
    if shares and args.get(PATTERN) is None and ns.hybrid_layer_pattern is ns.hybrid_override_pattern is None:
        raise ConfigError(
            f"{where} is of a model with {shares[0]} {args[shares[0]]}, and its args do not write out the layers; give "
            f"them with {_flag(PATTERN)}"
        )
    for name in UNSUPPORTED:
        if args.get(name):
            refusal = refused_names()[megatron_table()[name]["names"][0]]
            raise ConfigError(f"{where} is of a model with {name} {args[name]}: {refusal.reason}")


def _spec(name: str) -> FlagSpec:
    return next(spec for spec in all_specs() if spec.dest == name)


def _flag(name: str) -> str:
    return _spec(name).names[0]


def _normal(name: str, value: Any) -> Any:
    """A flag's value as :mod:`resolve` makes it, for flags that take several types of values."""
    if name == "window_size":
        return window(value)
    return pattern(_flag(name), value) if name in _PATTERNS else value


def _checked(name: str, value: Any, where: Path) -> Any:
    """A value of a checkpoint's args, converted to the flag's type; ConfigError where the flag cannot have it."""
    if value is None:
        return None
    spec = _spec(name)
    if spec.kind in ("int", "float") and type(value) in (int, float) and math.isfinite(value):
        if spec.kind == "float" or value == int(value):
            return float(value) if spec.kind == "float" else int(value)
    elif spec.kind in ("on", "off") and type(value) is bool:
        return value
    elif name == "window_size" and isinstance(value, (list, tuple, str)):
        return window(value)
    elif name in _PATTERNS and type(value) in (int, list, tuple, str):
        return pattern(spec.names[0], list(value) if isinstance(value, tuple) else value)
    elif spec.kind == "str" and type(value) is str and value in (spec.choices or (value,)):
        return value
    shown = repr(value) if isinstance(value, (bool, int, float, str, list, tuple)) else "(not a plain value)"
    raise ConfigError(
        f"the args in {where} have {name} {shown}, which {spec.names[0]} does not take; "
        f"leave {FLAG} out and give the model's flags"
    )
