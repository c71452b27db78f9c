"""What differs between the tested versions of megatron-core, in one place, each with its reason.

The rest of the adapter reads as if there were one megatron-core. What cannot be had from the installed one is a
ConfigError with one sentence. Where a version only changes numbers (router probabilities in fp32 until the end,
auxiliary losses per token, ...) nothing is done here: a job computes what megatron-core of that version computes, and
all groups of a job have the same version, because it is part of the job's identity.

Promises: importing this module imports neither torch nor megatron.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import inspect
import logging
import queue
import sys
import types
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from spare_megatron.config.errors import ConfigError
from spare_megatron.megatron_adapter.imports import imported_when_used
from spare_megatron.megatron_adapter.versions import TESTED, core_version, release

# -------------------------------------------------------------------------------------------------------- imports

_STASH = "megatron.core.transformer.moe.ops.paged_stash"
_TRITON_WORDS = ("jit", "autotune", "heuristics")


@contextlib.contextmanager
def without_triton() -> Iterator[None]:
    """Inside, the parts of megatron-core that train on the CPU can be imported without the package triton.

    0.18 and newer import it unconditionally where they keep activations of MoE layers in pages
    (``--moe-paged-stash``, which is refused). 0.19 has those kernels in a module of their own, which is replaced by one
    that has none; in 0.18 they are beside what is needed, so there triton itself is replaced, during the import.
    """
    if release() < (0, 18) or importlib.util.find_spec("triton") is not None:
        yield
        return
    if release() >= (0, 19):
        none = types.ModuleType(_STASH)
        none.__dict__.update(GLOBAL_BLOCK_SIZE=1024, paged_stash_copy_kernel=None, paged_stash_pop_kernel=None)
        sys.modules[_STASH] = none
        yield
        return
    language = types.ModuleType("triton.language")
    language.__dict__.update(constexpr=object)
    triton = types.ModuleType("triton")
    triton.__dict__.update(dict.fromkeys(_TRITON_WORDS, _undecorated), language=language)
    sys.modules |= {"triton": triton, "triton.language": language}
    try:
        yield
    finally:
        del sys.modules["triton"], sys.modules["triton.language"]


def _undecorated(function: Any = None, **_options: Any) -> Any:
    return function if function is not None else _undecorated


def explain_import(error: ImportError) -> ConfigError | None:
    """The sentence for a name or module of megatron-core that the installed version does not have; None for other
    errors."""
    module = error.name or ""
    if not module.startswith("megatron."):
        return None
    return ConfigError(
        f"megatron-core {core_version()} is not one that this package can use: {error.msg} ({module}); "
        f"install megatron-core {TESTED}"
    )


deprecations: list[str] = []
"""What megatron-core has said in this process of the models that it builds; a job shows it once, not once per group."""


class QuietLogs(logging.Filter):
    """Drops what megatron-core logs at every start about choices that are this package's, not the user's, and keeps
    back what concerns the whole job."""

    _OF_THE_JOB = "GPTModel IS DEPRECATED"  # 0.19: the model that pretrain_gpt.py builds
    _TEXTS = (
        _OF_THE_JOB,
        "full_param_layout not provided",  # 0.18: DDP then lays its buffers out as before
        "async save is deprecated",  # 0.17: only its planning is used here
        "load_common is deprecated",  # 0.19
        "Using all-reduce for gradient reductions",  # 0.18: GroupDDP reduces nothing
    )

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether ``record`` is logged."""
        text = str(record.msg)
        if not record.name.startswith("megatron.") or not any(known in text for known in self._TEXTS):
            return True
        if self._OF_THE_JOB in text and text not in deprecations:
            deprecations.append(text)
        return False


# --------------------------------------------------------------------------------------------------------- configs


def known_fields(
    config: type, values: Mapping[str, Any], gone: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """``values`` for the dataclass ``config``, without fields that this megatron-core no longer has.

    Args:
        gone: field -> the default that it had in an older version: a field with this value can be left out.

    Raises:
        ConfigError: a field that this version does not have was given another value.
    """
    fields = {field.name for field in dataclasses.fields(config)}
    for name in values.keys() - fields:
        if name not in gone or values[name] != gone[name]:
            raise ConfigError(
                f"{name} is {values[name]}, but megatron-core {core_version()} has no such setting in its "
                f"{config.__name__}; leave its flag out or install megatron-core {TESTED}"
            )
    return {name: value for name, value in values.items() if name in fields}


_GONE_FROM_TRANSFORMER = {"moe_extended_tp": False, "moe_use_legacy_grouped_gemm": False}
"""Fields of TransformerConfig that 0.17 no longer has -> their default."""
_RENAMED_IN_TRANSFORMER = {"cuda_graph_scope": "cuda_graph_modules"}
"""Fields of TransformerConfig to which 0.18 gave another name."""


def transformer_fields(config: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """``values``, by the names of 0.16, for megatron-core's TransformerConfig or a subclass. Raises ConfigError as
    :func:`known_fields`."""
    fields = {field.name for field in dataclasses.fields(config)}
    renamed = {old: new for old, new in _RENAMED_IN_TRANSFORMER.items() if new in fields}
    return known_fields(config, {renamed.get(k, k): v for k, v in values.items()}, _GONE_FROM_TRANSFORMER)


def auto_scalers() -> tuple[Any, ...]:
    """megatron-core's autograd functions by which losses beside the main one enter a backward pass; each has a
    ``main_loss_backward_scale``. That of sparse attention came with 0.16.1."""
    from megatron.core.transformer.moe.router import MoEAuxLossAutoScaler
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

    found = [MoEAuxLossAutoScaler, MTPLossAutoScaler]
    with contextlib.suppress(ImportError):
        from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossAutoScaler

        found.append(DSAIndexerLossAutoScaler)
    return tuple(found)


def taken_prediction_losses() -> list[Any]:
    """The losses that layers of multi-token prediction have noted in megatron-core's tracker, one for each layer, each
    a mean over the tokens of a microbatch; empty where none did. They are not in it any more. 0.18 renamed them."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    noted: dict[str, Any] = dict(MTPLossLoggingHelper.tracker)
    MTPLossLoggingHelper.tracker.clear()
    return list(noted.get("loss_values", noted.get("values", ())))


def routing_tracker() -> dict[str, Any]:
    """megatron-core's tracker of the losses by which routers keep experts' loads even: name -> an entry with the sum
    over microbatches of each layer's. It has been a class since 0.18, whose entries are no mappings."""
    try:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    except ImportError:
        from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

        return get_moe_layer_wise_logging_tracker()  # type: ignore[no-any-return]
    return get_moe_metrics_tracker().metrics  # type: ignore[no-any-return]


def taken_routing_losses() -> dict[str, Any]:
    """What is in that tracker, summed over this rank's layers: name -> a tensor of one value. It is in it no more."""
    taken = {}
    for name, entry in routing_tracker().items():
        values = entry["values"] if isinstance(entry, dict) else entry.values
        taken[name] = values.double().sum()  # so that it does not depend on the layers of a stage
        values.zero_()
    return taken


# ------------------------------------------------------------------------------------------------------------ data


def tokenizer_builder() -> Callable[[Namespace], Any]:
    """megatron-core's function that builds a tokenizer from flags; 0.17 moved it. It gets a copy of the flags with the
    names that any version reads, and does not change the caller's."""
    where = "tokenizers.utils" if release() >= (0, 17) else "tokenizers.text.utils"
    with imported_when_used("transformers", "transformers.utils.chat_template_utils"):
        build = importlib.import_module(f"megatron.core.{where}.build_tokenizer").build_tokenizer
        if release() >= (0, 19):  # else the function imports it when it is called
            importlib.import_module("megatron.core.tokenizers.text.libraries")

    def build_from(args: Namespace) -> Any:
        return build(_tokenizer_flags(args))

    return build_from


def _tokenizer_flags(args: Namespace) -> Namespace:
    """``args`` with the names of 0.17 and 0.18 beside those of 0.16, which are the ones of this package's flags."""
    defaults = {"chat_template": None, "tokenizer_sentencepiece_ignore_extra_whitespaces": True}
    flags = Namespace(**{**defaults, **vars(args)})
    flags.tokenizer_hf_no_use_fast = not args.tokenizer_hf_use_fast
    flags.tokenizer_hf_no_include_special_tokens = not args.tokenizer_hf_include_special_tokens
    flags.special_tokens, flags.metadata_path = args.tokenizer_special_tokens, args.tokenizer_metadata
    flags.pad_vocab_size = False  # worker.tokenizer pads
    return flags


def context_cut() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """megatron-core's function that cuts a batch for a context-parallel rank; since 0.18 it must be given the group."""
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_cp_rank as cut

    if "is_hybrid_cp" not in inspect.signature(cut).parameters:
        return cut  # type: ignore[no-any-return]
    return lambda batch: cut(batch, is_hybrid_cp=False, cp_group=parallel_state.get_context_parallel_group())


# ----------------------------------------------------------------------------------------------------- checkpoints


def plan_save(strategy: Any) -> Callable[..., Any]:
    """The method of a torch_dist strategy that plans and writes a checkpoint. Since 0.17 it has a choice of writers, of
    which the default is another package."""
    save = strategy.async_save
    if "async_strategy" in inspect.signature(save).parameters:
        return lambda *args: save(*args, async_strategy="mcore")
    return save  # type: ignore[no-any-return]


@contextlib.contextmanager
def writer_replaced(writer: type) -> Iterator[None]:
    """Inside, megatron-core's torch_dist strategy plans with ``writer``, and makes no Manager process for results."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.dist_checkpointing.strategies import torch as core_strategy

    # 0.17 looks its writer up in the writer's own module, and has renamed the function that makes the queue
    queues = ("_get_write_results_queue", "get_write_results_queue")
    changes: list[tuple[Any, str, Any]] = [(filesystem_async, name, lambda *_mode: queue.Queue()) for name in queues]
    changes += [(module, "FileSystemWriterAsync", writer) for module in (filesystem_async, core_strategy)]
    before = [(module, name, getattr(module, name)) for module, name, _ in changes if hasattr(module, name)]
    for module, name, new in changes:
        if hasattr(module, name):
            setattr(module, name, new)
    try:
        yield
    finally:
        for module, name, old in before:
            setattr(module, name, old)


def has_readable_common(directory: Path) -> bool:
    """Whether the installed version finds what a checkpoint has besides tensors. 0.19 and newer save it as one object
    beside them, which older ones do not look for. Ours have it in a file, for all versions."""
    return release() >= (0, 19) or (directory / "common.pt").exists()


_LEARNING_RATES = ("max_lr", "min_lr")
_NORM_GROUP = "grad_norm_group"
SCHEDULED = (*_LEARNING_RATES, "start_wd", "end_wd")
"""Rates of a schedule that a parameter group may have of its own."""
RATES = (*SCHEDULED, "optimizer")
"""Options of a parameter group that follow from this job's flags, whatever a checkpoint's groups had."""


def rates_by_width(optimizer: Any, model: Any) -> dict[Any, Any] | None:
    """The rates and other options of single kinds of parameters, for megatron-core's optimizer factory, where the model
    has maximal update parametrization (``--use-mup``, since 0.17); None for the factory's own."""
    if not getattr(model, "use_mup", False):
        return None
    from megatron.core import optimizer as core_optimizer

    width = core_optimizer.get_mup_config_overrides(optimizer, model.mup_width_mult, optimizer.optimizer)
    return {**core_optimizer.get_standard_config_overrides(optimizer), **width}


def load_optimizer(chained: Any, state: Any) -> None:
    """Load a state into a chained optimizer. It finds its parameter groups by their learning rates too, as it does
    since 0.19; before, groups that differ in nothing else (``--decoupled-lr``) were taken for one."""
    from megatron.core.optimizer import distrib_optimizer, optimizer

    before = optimizer.param_group_identifier_keys
    groups = [group for one in chained.chained_optimizers for group in one.param_groups]
    more = [name for name in _LEARNING_RATES if name not in before and all(name in group for group in groups)]
    for module in (optimizer, distrib_optimizer):
        module.param_group_identifier_keys = (*before, *more)
    try:
        chained.load_state_dict(state)
    finally:
        for module in (optimizer, distrib_optimizer):
            module.param_group_identifier_keys = before


def norm_gradients(part: Any, separate: str | None = None) -> Sequence[Any]:
    """The gradients of one of a chained optimizer's parts that count in the norm. Since 0.19 parameters may have a norm
    of their own, named ``separate``, and do not count in that of the others."""
    if hasattr(part, "get_grads_for_grad_norm"):
        return part.get_grads_for_grad_norm(separate)  # type: ignore[no-any-return]
    return part.get_main_grads_for_grad_norm()  # type: ignore[no-any-return]


def set_norm_gradients(part: Any, gradient: Callable[[Any], Any], tokens_ahead: int) -> list[Any]:
    """Have the norm of one of a chained optimizer's parts be that of ``gradient(main)`` of all that it updates now,
    whatever it will update later; returns these gradients. Where this rank has none (None) nothing counts. Since 0.19
    the layers that predict ``tokens_ahead`` further tokens have a norm of their own (:func:`norm_gradients`)."""
    from megatron.core import tensor_parallel
    from megatron.core.transformer.module import param_is_not_shared

    counted: dict[str | None, list[Any]] = {}
    for main in part.get_parameters():
        if param_is_not_shared(main) and tensor_parallel.param_is_not_tensor_parallel_duplicate(
            main, getattr(part, "tp_group", None)
        ):
            here = gradient(main)
            counted.setdefault(getattr(main, _NORM_GROUP, None), []).extend([] if here is None else [here])
    if hasattr(part, "get_grads_for_grad_norm"):
        part.get_grads_for_grad_norm = lambda separate=None: counted.get(separate, [])
        part.has_grad_norm_group = lambda separate: tokens_ahead > 0
    else:
        part.get_main_grads_for_grad_norm = lambda: [one for group in counted.values() for one in group]
    return [one for group in counted.values() for one in group]


def count_copies_of_experts(chained: Any) -> None:
    """Have the norm of experts' gradients, of which those of biases are copies, count one rank of those that divide an
    expert. megatron-core does that in 0.19; before, it counts the first rank of those that divide other layers. Where
    these are more, ranks have other norms, clip by them, and drift apart."""
    from megatron.core import parallel_state

    for part in chained.chained_optimizers:
        if any(group["is_expert_parallel"] for group in part.param_groups):
            part.tp_group = parallel_state.get_expert_tensor_parallel_group()


def copy_norm_group(parameter: Any, part: Any) -> None:
    """Have a part of a parameter be clipped by the same norm as the parameter."""
    if hasattr(parameter, _NORM_GROUP):
        setattr(part, _NORM_GROUP, getattr(parameter, _NORM_GROUP))


def set_norm(chained: Any, norm: Callable[..., float]) -> None:
    """Have a chained optimizer clip by, and report, ``norm()``; where parameters have a norm of their own, clip them by
    ``norm(name)``."""
    chained.get_grad_norm = norm
    chained._get_grad_norm_for_group = norm


def unscale_all(part: Any, gradients: Sequence[Any]) -> None:
    """With a loss scale, have one of a chained optimizer's parts unscale all these ``gradients``, and skip an update
    if any of them is not finite, whatever the part updates. Among them is the memory of those of what it updates."""
    if getattr(part, "grad_scaler", None) is None:
        return
    import torch

    def unscale() -> bool:
        part.found_inf.fill_(0.0)
        torch._amp_foreach_non_finite_check_and_unscale_(list(gradients), part.found_inf, part.grad_scaler.inv_scale)
        group = part.get_grad_stats_parallel_group()
        torch.distributed.all_reduce(part.found_inf, op=torch.distributed.ReduceOp.MAX, group=group)
        return bool(part.found_inf.item() > 0)

    part._unscale_main_grads_and_check_for_nan = unscale


# ------------------------------------------------------------------------------------------------------- schedules


def backward_step(given: Any, output: Any, gradient: Any, model: Any, config: Any) -> Any:
    """The backward pass of one microbatch on one chunk, by megatron-core's ``backward_step``; returns the gradient of
    what was given. The model's type is an argument of it until encoder-decoder models left megatron-core (0.17)."""
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.utils import get_model_type

    kind = (get_model_type(model),) if "model_type" in inspect.signature(schedules.backward_step).parameters else ()
    return schedules.backward_step(given, output, gradient, *kind, config)
