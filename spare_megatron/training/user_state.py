"""What Megatron's users ask for from anywhere: ``get_args()``, ``get_tokenizer()``, ``get_timers()``.

Users' forward steps and providers have no arguments through which these could be passed, so one module keeps them for
the process. It is written once, by ``pretrain``, and read by users' code only: the framework itself passes what it
needs. Importing this module imports neither torch nor megatron.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spare_megatron.megatron_adapter.world import GroupWorld
    from spare_megatron.training.arguments import JobArguments


@dataclass
class UserState:
    """What is there once the job has started."""

    args: Namespace
    tokenizer: Any = None
    timers: Any = None
    make_transformer_config: Callable[[], Any] | None = None
    """Makes megatron-core's TransformerConfig of this rank."""


_state: UserState | None = None


def start(state: UserState) -> None:
    """Make the state of this process known; a later call replaces it (several jobs in one test process)."""
    global _state
    _state = state


def begin(job: JobArguments, args: Namespace, tokenizer: Any, world: GroupWorld | None = None) -> None:
    """:func:`start` for a Megatron job: what users' code reads from ``args`` that only torch can say is set here.

    ``args.padded_vocab_size`` must be set (:func:`spare_megatron.training.tokenizer.build_tokenizer` does).
    """
    import torch

    from spare_megatron.megatron_adapter.settings import uses_local_layers

    settings = job.settings(args.padded_vocab_size)
    if args.deterministic_mode:
        torch.use_deterministic_algorithms(True)
    args.params_dtype = torch.half if args.fp16 else torch.bfloat16 if args.bf16 else torch.float
    args.transformer_impl = "local" if uses_local_layers(settings) else "transformer_engine"
    state = UserState(args, tokenizer)
    if world is not None:
        from spare_megatron.megatron_adapter import timers
        from spare_megatron.megatron_adapter.model import transformer_config

        state.timers = timers.make_timers(args.timing_log_level, args.timing_log_option)
        state.make_transformer_config = lambda: transformer_config(settings, world)
    start(state)


def clear() -> None:
    """Forget it."""
    global _state
    _state = None


def current(name: str) -> UserState:
    """The state; ``name`` is the function that asks."""
    if _state is None:
        raise RuntimeError(
            f"{name} was called before pretrain() started the job; call it inside forward_step or a provider"
        )
    return _state


def get_args() -> Namespace:
    """All flags by Megatron's names, resolved; shared by the whole process."""
    return current("get_args()").args


def get_tokenizer() -> Any:
    """The job's tokenizer."""
    return current("get_tokenizer()").tokenizer


def get_timers() -> Any:
    """megatron-core's timers: ``timers('name', log_level=1).start()`` and ``.stop()``."""
    return current("get_timers()").timers


def core_transformer_config_from_args(args: Namespace | None = None, config_class: type | None = None) -> Any:
    """megatron-core's TransformerConfig of this rank, of ``config_class`` where one is given.

    ``args`` is taken for the sake of Megatron's signature; the config is that of the job's flags.
    """
    make = current("core_transformer_config_from_args()").make_transformer_config
    if make is None:
        raise RuntimeError("this process trains no Megatron model, so it has no TransformerConfig")
    config = make()
    if config_class is None or type(config) is config_class:
        return config
    import dataclasses

    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config) if field.init}
    return config_class(**values)


def print_rank_0(message: object, rank: int | None = None) -> None:
    """Print once per job: on rank 0 of the whole job, or where ``rank`` is 0."""
    mine = rank if rank is not None else (0 if _state is None else _state.args.rank)
    if mine == 0:
        print(message, flush=True)
