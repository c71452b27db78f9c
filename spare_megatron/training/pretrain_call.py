"""What a script asks of ``pretrain``, whichever of Megatron's three orders of arguments it uses.

Until 0.17 the providers come first, and ``pretrain`` reads the command line. In 0.18 a container of configurations
comes before them, made from flags that the script has read already; since 0.19 the model's provider is left out where
the container names the model. The two later forms are distinguished from the first by the container.
"""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from spare_megatron.config.errors import ConfigError


@dataclass(frozen=True)
class GPTModelConfig:
    """Stands for the model that the flags describe, as Megatron's class of this name does for a script that edits
    nothing of it."""


@dataclass(frozen=True)
class HybridModelConfig:
    """The same for the hybrid model that the flags describe."""


@dataclass(frozen=True)
class PretrainConfigContainer:
    """Stands for Megatron's container of configurations: the flags, from which all of them follow, and the model."""

    args: Namespace
    model: GPTModelConfig | HybridModelConfig | None = None


@dataclass(frozen=True)
class PretrainCall:
    """The arguments of one call of ``pretrain``."""

    datasets_provider: Callable[..., Any]
    model_provider: Callable[..., Any] | None
    """None: the model that the flags describe."""
    forward_step: Callable[..., Any]
    container: PretrainConfigContainer | None = None
    """None: the command line is not read yet."""
    extra_args_provider: Callable[..., Any] | None = None
    args_defaults: Mapping[str, Any] | None = None
    get_embedding_ranks: Callable[..., list[int]] | None = None
    get_position_embedding_ranks: Callable[..., list[int]] | None = None


def read_call(*positional: Any, **named: Any) -> PretrainCall:
    """The call in one form. Raises ConfigError for a hook of Megatron's that is not supported, and TypeError, as any
    function does, for arguments that fit none of the orders."""
    first = positional[0] if positional else named.get("cfg_container")
    if not isinstance(first, PretrainConfigContainer):
        order: Callable[..., None] = _until_0_17
    elif len(positional) > 2 and callable(positional[2]):
        order = _in_0_18
    else:
        order = _since_0_19
    bound = inspect.signature(order).bind(*positional, **named).arguments
    unsupported = {
        **bound.pop("unsupported", {}),
        "process_non_loss_data_func": bound.pop("process_non_loss_data_func", None),
    }
    for name, value in unsupported.items():
        if value is not None and value is not False:
            raise ConfigError(f"pretrain() was given {name}, which is not supported; leave it out")
    bound.pop("model_type")
    container: PretrainConfigContainer | None = bound.pop("cfg_container", None)
    provider = bound.pop("train_valid_test_datasets_provider", None) or bound.pop("train_valid_test_dataset_provider")
    model = bound.pop("model_provider", None)
    if model is None and (container is None or container.model is None):
        raise ConfigError(
            "pretrain() was given no model: pass model_provider=..., or make its container by "
            "pretrain_cfg_container_from_args(args, gpt_config_from_args(args))"
        )
    return PretrainCall(provider, model, bound.pop("forward_step_func"), container, **bound)


def _until_0_17(
    train_valid_test_datasets_provider: Any,
    model_provider: Any,
    model_type: Any,
    forward_step_func: Any,
    process_non_loss_data_func: Any = None,
    extra_args_provider: Any = None,
    args_defaults: Any = None,
    get_embedding_ranks: Any = None,
    get_position_embedding_ranks: Any = None,
    **unsupported: Any,
) -> None:
    """The order of arguments of megatron-core 0.17 and before."""


def _in_0_18(
    cfg_container: Any,
    train_valid_test_dataset_provider: Any,
    model_provider: Any,
    model_type: Any,
    forward_step_func: Any,
    process_non_loss_data_func: Any = None,
    get_embedding_ranks: Any = None,
    get_position_embedding_ranks: Any = None,
    **unsupported: Any,
) -> None:
    """The order of arguments of 0.18."""


def _since_0_19(
    cfg_container: Any,
    train_valid_test_dataset_provider: Any,
    model_type: Any,
    forward_step_func: Any,
    model_provider: Any = None,
    process_non_loss_data_func: Any = None,
    get_embedding_ranks: Any = None,
    get_position_embedding_ranks: Any = None,
    **unsupported: Any,
) -> None:
    """The order of arguments of 0.19."""
