"""The state of the process that users' code reads: ``get_args()``, ``get_tokenizer()``, ``get_timers()``.

Users' forward steps and providers have no arguments through which these could be passed, so this module keeps them for
the process. ``pretrain`` sets them once, and only users' code reads them: the framework itself passes what it needs.
Importing this module imports neither torch nor megatron.
"""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spare_megatron.worker.job_arguments import JobArguments

log = logging.getLogger(__name__)


@dataclass
class UserState:
    """What users' code can ask for once the job has started."""

    args: Namespace
    tokenizer: Any = None
    """None before ``pretrain`` has begun, where only flags are known."""
    make_transformer_config: Callable[[], Any] = lambda: None
    """Makes megatron-core's TransformerConfig of this rank."""

    @cached_property
    def timers(self) -> Any:
        """megatron-core's timers, which are made when they are first used."""
        from spare_megatron.megatron_adapter import timers

        return timers.make_timers(self.args.timing_log_level, self.args.timing_log_option)


_TOO_EARLY = "{} was called before pretrain() started the job; call it inside forward_step or a provider"

_state: UserState | None = None
_startup: dict[str, float] = {}


def start(state: UserState) -> None:
    """Set the state of this process; a later call replaces it, as where a test process runs several jobs."""
    global _state
    _state = state


def begin(job: JobArguments, args: Namespace, tokenizer: Any) -> None:
    """Set the state of this process for a Megatron job, and the values in ``args`` that need torch.

    ``args.padded_vocab_size`` must be set (:func:`spare_megatron.worker.tokenizer.build_tokenizer` does).
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

        return transformer_config(settings, job.here)

    start(UserState(args, tokenizer, make_transformer_config))
    if args.rank == 0 and len(_startup) == 2:
        log.info("the script's own imports took %.1f s", _startup["main_entry"] - _startup["program_start"])


def set_startup_timestamps(
    program_start: float | None = None,
    main_entry: float | None = None,
    launch_script_start: float | None = None,
    launch_script_presrun: float | None = None,
    slurm_job_start_time: float | None = None,
) -> None:
    """Note the Unix times at which the script and its main part began; the time between them is logged at the start.
    Those of what ran before the script are accepted as in Megatron, and not used."""
    given = {"program_start": program_start, "main_entry": main_entry}
    _startup.update({name: value for name, value in given.items() if value is not None})


def clear() -> None:
    """Forget the state of this process."""
    global _state
    _state = None


def current(name: str) -> UserState:
    """The state of this process; ``name`` is the function that asks, for the error message."""
    if _state is None:
        raise RuntimeError(_TOO_EARLY.format(name))
    return _state


def begun(name: str) -> UserState:
    """The state of this process, with what ``pretrain`` makes of the flags."""
    state = current(name)
    if state.tokenizer is None:
        raise RuntimeError(_TOO_EARLY.format(name))
    return state


def get_args() -> Namespace:
    """All flags by Megatron's names, resolved; shared by the whole process."""
    return current("get_args()").args


def get_tokenizer() -> Any:
    """The job's tokenizer."""
    return begun("get_tokenizer()").tokenizer


def get_timers() -> Any:
    """megatron-core's timers: ``timers('name', log_level=1).start()`` and ``.stop()``."""
    return current("get_timers()").timers


def get_one_logger() -> None:
    """Returns None, as Megatron does where its one-logger is not installed."""


def get_adlr_autoresume() -> None:
    """Returns None, as Megatron does without --adlr-autoresume."""


def core_transformer_config_from_args(args: Namespace | None = None, config_class: type | None = None) -> Any:
    """megatron-core's TransformerConfig of this rank, of ``config_class`` where one is given.

    ``args`` is accepted as in Megatron but not used: the config is that of the job's flags.
    """
    config = begun("core_transformer_config_from_args()").make_transformer_config()
    if config_class is None or type(config) is config_class:
        return config
    import dataclasses

    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config) if field.init}
    return config_class(**values)


def print_rank_0(message: object, rank: int | None = None) -> None:
    """Print on rank 0 of the whole job only, or, if ``rank`` is given, where that is 0."""
    mine = rank if rank is not None else (0 if _state is None else _state.args.rank)
    if mine == 0:
        print(message, flush=True)
