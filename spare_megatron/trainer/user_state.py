"""What Megatron's users ask for from anywhere: ``get_args()``, ``get_tokenizer()``, ``get_timers()``.

Users' forward steps and providers have no arguments through which these could be passed, so one module keeps them for
the process. It is written once, by ``pretrain``, and read by users' code only: the framework itself passes what it
needs. Importing this module imports neither torch nor megatron.
"""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spare_megatron.trainer.job_arguments import JobArguments

log = logging.getLogger(__name__)


@dataclass
class UserState:
    """What is there once the job has started."""

    args: Namespace
    tokenizer: Any = None
    make_transformer_config: Callable[[], Any] | None = None
    """Makes megatron-core's TransformerConfig of this rank."""

    @cached_property
    def timers(self) -> Any:
        """megatron-core's timers, made when they are first asked for."""
        from spare_megatron.megatron_adapter import timers

        return timers.make_timers(self.args.timing_log_level, self.args.timing_log_option)


_state: UserState | None = None
_startup: dict[str, float] = {}


def start(state: UserState) -> None:
    """Make the state of this process known; a later call replaces it (several jobs in one test process)."""
    global _state
    _state = state


def begin(job: JobArguments, args: Namespace, tokenizer: Any) -> None:
    """:func:`start` for a Megatron job: what users' code reads from ``args`` that only torch can say is set here.

    ``args.padded_vocab_size`` must be set (:func:`spare_megatron.trainer.tokenizer.build_tokenizer` does).
    """
    import torch

    from spare_megatron.megatron_adapter.model.settings import uses_local_layers

    settings = job.settings(args.padded_vocab_size)
    if args.deterministic_mode:
        torch.use_deterministic_algorithms(True)
    args.params_dtype = torch.half if args.fp16 else torch.bfloat16 if args.bf16 else torch.float
    args.transformer_impl = "local" if uses_local_layers(settings) else "transformer_engine"

    def make_transformer_config() -> Any:
        from spare_megatron.megatron_adapter.model.replica import transformer_config

        return transformer_config(settings, job.shape)

    start(UserState(args, tokenizer, make_transformer_config))
    if args.rank == 0 and len(_startup) == 2:
        log.info("the script's own imports took %.1f s", _startup["main_entry"] - _startup["program_start"])


def set_startup_timestamps(program_start: float | None = None, main_entry: float | None = None) -> None:
    """Unix times at which the script began and at which its main part did; the job's first log line has the gap."""
    given = {"program_start": program_start, "main_entry": main_entry}
    _startup.update({name: value for name, value in given.items() if value is not None})


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


def get_one_logger() -> None:
    """Nothing, as under Megatron where its one-logger is not installed."""


def get_adlr_autoresume() -> None:
    """Nothing, as under Megatron without --adlr-autoresume."""


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
