"""``pretrain(...)``: Megatron's entry point with Megatron's signature, for a job that survives the loss of groups.

A user's script calls it with a provider of data sets, a provider of the model and a forward step. One process is one
rank; its place comes from spare-launch, torchrun or Slurm. A wrong flag ends the process with one sentence before
torch is imported. The module is named after ``megatron.training.training``.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.exits import ExitCode
from spare_megatron.config.place import Place
from spare_megatron.control.run_directory import RunDirectory
from spare_megatron.trainer.job_arguments import parse_job
from spare_megatron.trainer.user_state import get_args
from spare_megatron.training import megatron_exports


def pretrain(
    train_valid_test_datasets_provider: Callable[..., Any],
    model_provider: Callable[..., Any],
    model_type: Any,
    forward_step_func: Callable[..., Any],
    process_non_loss_data_func: Callable[..., Any] | None = None,
    extra_args_provider: Callable[..., Any] | None = None,
    args_defaults: Mapping[str, Any] | None = None,
    get_embedding_ranks: Callable[..., list[int]] | None = None,
    get_position_embedding_ranks: Callable[..., list[int]] | None = None,
    **unsupported: Any,
) -> None:
    """Train until the job is over for this rank; returns when the job has finished, else ends the process with an exit
    code.

    Args:
        train_valid_test_datasets_provider: (numbers of samples of training, validation, test) -> three data sets.
        model_provider: (pre_process, post_process[, vp_stage]) -> module.
        model_type: accepted as in Megatron; all models are decoders.
        forward_step_func: (data iterator, model) -> (output tensor, loss function).
        extra_args_provider: adds flags to an argparse parser.
        args_defaults: defaults of flags, by name.
        get_embedding_ranks: (ranks of a pipeline) -> those that hold a word embedding; megatron-core's own if None.
        get_position_embedding_ranks: the same for position embeddings.
        unsupported: Megatron's other hooks, each of which is refused by name when it is given.
    """
    if process_non_loss_data_func is not None:
        unsupported["process_non_loss_data_func"] = process_non_loss_data_func
    place: Place | None = None
    try:
        for name, value in unsupported.items():
            if value is not None:
                raise ConfigError(f"pretrain() was given {name}, which is not supported; leave it out")
        job, args = parse_job(sys.argv[1:], os.environ, extra_args_provider, args_defaults)
        place = job.place
        _log_to_stderr(place, job.logging.logging_level)
        from spare_megatron.megatron_adapter.model.world import EmbeddingRanks
        from spare_megatron.trainer.megatron_job import run_megatron_job

        embeddings = EmbeddingRanks(get_embedding_ranks, get_position_embedding_ranks)
        code = run_megatron_job(
            job, args, train_valid_test_datasets_provider, model_provider, forward_step_func, embeddings
        )
    except ConfigError as error:
        code = _refuse(str(error), place)
    if code != ExitCode.FINISHED:
        sys.stdout.flush()
        sys.stderr.flush()
        # Other ranks of this group may be dead, so no exit handler may run that waits for them.
        os._exit(code)


def get_train_valid_test_num_samples() -> tuple[int, int, int]:
    """Numbers of samples that the job draws for training, validation and test."""
    from spare_megatron.data.dataset_build import sample_counts

    args = get_args()
    return sample_counts(args.train_iters, args)


def __getattr__(name: str) -> Any:
    raise megatron_exports.missing(__name__, name)


def _log_to_stderr(place: Place, level: int | None) -> None:
    logging.basicConfig(
        level=level or logging.INFO,
        format=f"%(asctime)s group {place.group} rank {place.position} %(levelname)s %(message)s",
        stream=sys.stderr,
    )


def _refuse(sentence: str, place: Place | None) -> ExitCode:
    """Write one sentence to this rank's standard error, and to the run directory, from which the launcher shows it
    once."""
    sys.stderr.write(f"{os.path.basename(sys.argv[0])}: {sentence}\n")
    run_dir = place.run_dir if place is not None else os.environ.get("SPARE_RUN_DIR")
    if run_dir:
        who = "rank" if place is None else f"group-{place.group}-rank-{place.position}"
        RunDirectory(run_dir).report_error(f"{who}-{os.getpid()}", sentence)
    return ExitCode.BAD_INPUT
