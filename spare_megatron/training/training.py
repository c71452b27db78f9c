"""``pretrain(...)``: Megatron's entry point with Megatron's signature, for a job that survives the loss of groups.

A user's script calls it with a provider of data sets, a provider of the model and a forward step. One process is one
rank; its place comes from spare-launch, torchrun or Slurm. A wrong flag ends the process with one sentence before
torch is imported. The module is named after ``megatron.training.training``.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.exits import ExitCode
from spare_megatron.config.place import Place
from spare_megatron.control_plane.exit_report import exit_reported
from spare_megatron.megatron_adapter.imports import uncollected
from spare_megatron.runtime.run_directory import RunDirectory
from spare_megatron.training import command_line, megatron_exports
from spare_megatron.training.pretrain_call import read_call
from spare_megatron.worker.user_state import get_args


def pretrain(*positional: Any, **named: Any) -> None:
    """Train until the job is over for this rank; returns when the job has finished, else ends the process with an exit
    code.

    The arguments stand in the order of any Megatron (:mod:`spare_megatron.training.pretrain_call`):

    Args:
        cfg_container: since 0.18: the flags that ``parse_and_validate_args`` has read, in the container of
            ``pretrain_cfg_container_from_args``. Without it ``pretrain`` reads them.
        train_valid_test_datasets_provider: (numbers of samples of training, validation, test) -> three data sets.
        model_provider: (pre_process, post_process[, vp_stage]) -> module.
        model_type: accepted as in Megatron; all models are decoders.
        forward_step_func: (data iterator, model) -> (output tensor, loss function).
        extra_args_provider: adds flags to an argparse parser.
        args_defaults: defaults of flags, by name.
        get_embedding_ranks: (ranks of a pipeline) -> those that hold a word embedding; megatron-core's own if None.
        get_position_embedding_ranks: the same for position embeddings.

    Megatron's other hooks are refused by name when they are given.
    """
    place: Place | None = None
    try:
        call = read_call(*positional, **named)
        with uncollected():
            if call.container is not None:
                job, args = command_line.parsed(call.container.args)
            else:
                job, args = command_line.read(call.extra_args_provider, call.args_defaults)
            place = job.place
            run = command_line.job_runner()
        with exit_reported(RunDirectory(place.run_dir), place) if place.run_dir else nullcontext():
            code = run(job, args, call)
    except ConfigError as error:
        code = command_line.refuse(str(error), place)
    if code != ExitCode.FINISHED:
        command_line.leave(code, place)


def get_train_valid_test_num_samples() -> tuple[int, int, int]:
    """Numbers of samples that the job draws for training, validation and test."""
    from spare_megatron.data.dataset_build import sample_counts

    args = get_args()
    return sample_counts(args.train_iters, args)


def update_seqlen_stats_from_cu_seqlens(_cu_seqlens: Any) -> None:
    """Refused where it is called: a script imports it always, and calls it for packed sequences only."""
    raise ConfigError("update_seqlen_stats_from_cu_seqlens() was called, but packed sequences are not supported")


def __getattr__(name: str) -> Any:
    raise megatron_exports.missing(__name__, name)
