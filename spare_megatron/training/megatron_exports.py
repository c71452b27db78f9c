"""Finds the names that Megatron-LM's users import from ``megatron.training``, or says why one does not exist here.

A user's script is ported by writing ``spare_megatron`` for ``megatron`` in its imports of ``megatron.training``; the
package, ``spare_megatron`` itself and the modules with Megatron's names (``arguments``, ``global_vars``, ``training``,
``utils``, ...) look names up here. Imports nothing heavy, so that a bad flag is refused before torch is imported.
"""

from __future__ import annotations

import importlib
from typing import Any

from spare_megatron.config.errors import ConfigError

_STATE = "spare_megatron.worker.user_state"
_UTILS, _ENTRY, _FLAGS = (f"spare_megatron.training.{name}" for name in ("utils", "training", "arguments"))

EXPORTS = {
    "ModelType": "spare_megatron.training.model_type",
    "carry_state": "spare_megatron.worker.carried_state",
    "core_transformer_config_from_args": _STATE,
    "get_adlr_autoresume": _STATE,
    "get_args": _STATE,
    "get_one_logger": _STATE,
    "get_timers": _STATE,
    "get_tokenizer": _STATE,
    "get_train_valid_test_num_samples": _ENTRY,
    "is_last_rank": _UTILS,
    "parse_and_validate_args": _FLAGS,
    "pretrain": _ENTRY,
    "print_rank_0": _STATE,
    "print_rank_last": _UTILS,
    "set_startup_timestamps": _STATE,
}
"""Name -> the module that defines it."""

_BOARDS = (
    "the coordinator writes the figures of committed steps, once per job; return your own in the report of the loss "
    "function: they are averaged over the batch and appear in the log, on TensorBoard and on W&B"
)
_LOOP = "pretrain() does it, in an order that survives the loss of groups; pass it the providers and the forward step"
_SAVES = "checkpoints are written, checked and found by pretrain(): use --save, --load, --ckpt-step and --save-interval"

REFUSED = {
    "evaluate": _LOOP,
    "evaluate_and_print_results": _LOOP,
    "get_energy_monitor": "energy is not measured here",
    "get_model": _LOOP,
    "get_optimizer_param_scheduler": _LOOP,
    "get_signal_handler": "signals end the job by one decision for all groups: SIGTERM and SIGUSR1 save and leave",
    "get_tensorboard_writer": _BOARDS,
    "get_wandb_writer": _BOARDS,
    "initialize_megatron": _LOOP,
    "load_checkpoint": _SAVES,
    "save_checkpoint": _SAVES,
    "save_checkpoint_and_time": _SAVES,
    "parse_args": "parse_and_validate_args() of spare_megatron.training.arguments reads the flags and checks them",
    "set_args": "the flags of a job are the same on all its ranks and are fixed when it starts",
    "setup_model_and_optimizer": _LOOP,
    "train": _LOOP,
    "train_step": _LOOP,
    "training_log": _BOARDS,
    "calc_params_l2_norm": "it is not provided; use --log-params-norm",
    "print_params_min_max_norm": "it is not provided; use --log-params-norm",
    "check_adlr_autoresume_termination": "there is no such service here; Slurm jobs queue themselves again",
    "update_use_dist_ckpt": _SAVES,
    "validate_args": "parse_and_validate_args() of spare_megatron.training.arguments reads the flags and checks them",
}
"""Name -> why this package does not have it, and what to use."""


def lookup(module: str, name: str) -> Any:
    """``name`` for ``module.__getattr__``.

    Raises:
        ImportError: Megatron has the name, but this package does not; it gives the reason. Unlike that of an
            AttributeError, its message is shown for ``from ... import``.
        AttributeError: neither Megatron nor this package has the name.
    """
    if name in EXPORTS:
        return getattr(importlib.import_module(EXPORTS[name]), name)
    raise missing(module, name)


def missing(module: str, name: str) -> Exception:
    """The exception to raise for a name that ``module`` does not have."""
    if name in REFUSED:
        return ImportError(f"{module} has no {name}, which Megatron-LM has: {REFUSED[name]}", name=name)
    return AttributeError(f"module {module!r} has no attribute {name!r}")


def refused_kind(name: str, why: str) -> type:
    """A class for a script to import; ConfigError, with the reason, where it is made an object of."""

    def refuse(self: object, *_args: object, **_kwargs: object) -> None:
        raise ConfigError(f"{name} of Megatron-LM is not here: {why}")

    return type(name, (), {"__init__": refuse, "__doc__": f"Refused where it is used: {why}."})
