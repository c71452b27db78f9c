"""Chooses where training begins, at step 0 or from a checkpoint, and loads it; position 0 chooses for its group.

A group that comes to a job that trains already begins where the job began and loads nothing: living groups give it
their state."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spare_megatron.checkpoint.convert import tokenizer_files
from spare_megatron.checkpoint.folder import (
    RELEASE,
    TRACKER,
    Damage,
    damage,
    iteration_name,
    last_good,
    pointer_damage,
    to_begin_with,
)
from spare_megatron.config.batches import BatchSchedule
from spare_megatron.config.errors import ConfigError
from spare_megatron.config.job import JobDescription
from spare_megatron.config.place import Place
from spare_megatron.config.sections import CheckpointConfig
from spare_megatron.flags import checkpoint_args
from spare_megatron.megatron_adapter.checkpoint import group_checkpoint
from spare_megatron.megatron_adapter.json_collectives import broadcast_json
from spare_megatron.megatron_adapter.model.replica import Replica
from spare_megatron.megatron_adapter.shims import compute_device
from spare_megatron.protocol.codec import decode
from spare_megatron.runtime.disk import with_retries
from spare_megatron.runtime.run_directory import RunDirectory, glance
from spare_megatron.worker.job_arguments import JobArguments

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Start:
    """The step and the samples after which training begins."""

    step: int = 0
    consumed_samples: int = 0
    rank_state: Any = None
    """The state of this rank position's engine beside model and optimizer."""
    read_rank_states: Callable[[], list[Any]] = list
    """Reads those of all positions of the group that saved the checkpoint. Collective."""
    state_shards: int | None = None
    """S, where a checkpoint or the running job says it."""

    def batches(self, job: JobArguments) -> BatchSchedule:
        """The batch size of each step from this one on."""
        return job.batches.schedule(self.step + 1, self.consumed_samples)

    def shards(self, job: JobArguments) -> int:
        """S, the number of state shards. It is the number of groups with which the job was first started, and is
        recorded in its checkpoints. If groups keep some shards only and there are more groups now, it is their number:
        of fewer shards each group would keep a larger part."""
        known = self.state_shards or job.shape.num_groups
        return max(known, job.shape.num_groups) if job.divides_state else known


def load_start(job: JobArguments, args: Namespace, replica: Replica) -> Start:
    """Load a checkpoint into ``replica`` if there is one; returns where training begins. Collective in the group.

    Raises ConfigError where the checkpoint that was asked for is missing, damaged or of a model with other sizes than
    the one of ``args``.
    """
    chosen: dict[str, Any] = {}
    if job.place.is_leader:
        try:
            chosen["running"] = _of_running_job(job)
            found, chosen["own"] = _checkpoint(job) if chosen["running"] is None else (None, False)
            chosen["directory"] = None if found is None else str(found)
        except ConfigError as error:
            chosen["refusal"] = str(error)
    chosen = broadcast_json(chosen, device=compute_device())
    if "refusal" in chosen:
        raise ConfigError(chosen["refusal"])
    if chosen["running"] is not None:
        return Start(**chosen["running"])
    if chosen["directory"] is None:
        return Start()
    directory = Path(chosen["directory"])
    if not chosen["own"]:
        _compare_model(job, args, directory)
    fresh = not chosen["own"] and (job.checkpoint.finetune or directory.name == RELEASE)
    loaded = group_checkpoint.load(
        directory,
        replica,
        optimizer=chosen["own"] or not (fresh or job.checkpoint.no_load_optim),
        strictness=job.checkpoint.dist_ckpt_strictness,
    )
    if job.place.is_leader:
        _carry_files(job, directory)
        log.info("loaded %s: step %d, %d samples consumed", directory, loaded.step, loaded.consumed_samples)
        _compare_pieces(job, loaded.args)
    if fresh:
        return Start()
    consumed = loaded.consumed_samples or job.batches.samples_of(loaded.step)
    if consumed != loaded.consumed_samples and job.place.is_leader:
        _tell(
            f"{directory} does not say how many samples were consumed: data go on after the {consumed} of "
            f"{loaded.step} steps with these flags",
            job.place,
        )
    return Start(loaded.step, consumed, loaded.rank_state, loaded.read_rank_states, loaded.state_shards)


def _carry_files(job: JobArguments, loaded: Path) -> None:
    """Give the ``--save`` directory what came with the loaded model: a conversion to Hugging Face takes it along."""
    if not job.checkpoint.save:
        return
    try:
        aside = tokenizer_files.carry(loaded, Path(job.checkpoint.save))
        if aside is not None:
            log.warning(
                "--save %s had the tokenizer and config of another model; they are in %s now", aside.parent, aside
            )
    except OSError as error:
        log.warning(
            "the tokenizer and config of the loaded model cannot be copied to --save %s: %s; copy %s there before a "
            "conversion",
            job.checkpoint.save,
            error.strerror,
            tokenizer_files.folder_of(loaded),
        )


def _of_running_job(job: JobArguments) -> dict[str, int] | None:
    """Where the present job attempt began, as fields of :class:`Start`, if this group was restarted in it. None if it
    was not, or if the files of the run directory do not show it: they may be those of a dead coordinator."""
    if not job.place.restarts:
        return None
    run_dir = RunDirectory(str(job.place.run_dir))
    known, status, kept = run_dir.coordinator(), glance(run_dir.status), glance(run_dir.job)
    if not known or not status or not kept or (status["phase"], status.get("life")) != ("running", known.job_attempt):
        return None
    opened: JobDescription = decode(kept)
    log.info("the job trains already: the state comes from groups that live, not from a checkpoint")
    return {
        "step": int(status.get("first_step", 0)),
        "consumed_samples": opened.consumed_samples,
        "state_shards": opened.state_shards,
    }


def _compare_model(job: JobArguments, args: Namespace, directory: Path) -> None:
    """Refuse a checkpoint of a model with other sizes, with ``--finetune`` only say so, as Megatron does; and say by
    which other flags its weights compute something else here."""
    common = group_checkpoint.read_common(directory)
    saved = vars(common["args"]) if "args" in common else {}
    sizes, others = checkpoint_args.other_sizes(args, saved, directory), checkpoint_args.other_model(args, saved)
    rows = checkpoint_args.other_rows(args, saved, directory)
    if sizes and not job.checkpoint.finetune:
        raise ConfigError(sizes)
    if not job.place.is_leader:
        return
    for sentence in filter(None, (sizes, rows)):
        _tell(sentence, job.place)
    if others:
        _tell(f"{directory} was saved with other flags of the model: {'; '.join(others)}", job.place)


def _compare_pieces(job: JobArguments, before: Mapping[str, Any]) -> None:
    """Say what it means that the run which wrote the checkpoint had pieces of other microbatches."""
    ours, theirs = job.shape.piece_microbatches, before.get("spare_piece_microbatches") or 1
    if ours != theirs and job.spare.reduce.startswith("exact"):
        log.warning(
            "the checkpoint is of a run with --spare-piece-microbatches %s and this run has %d: weights, optimizer and "
            "scales go on, and sums are as exact as before, but their last bits are not those of a run that goes on "
            "with %s",
            theirs,
            ours,
            theirs,
        )


def _checkpoint(job: JobArguments) -> tuple[Path | None, bool]:
    """The checkpoint to load, None to begin at step 0, and whether the job itself saved it. A later job attempt begins
    with the newest one that it saved, if any, else as the first one began."""
    config = job.checkpoint
    if job.place.saved_step is not None and config.save:
        own, passed = last_good(Path(config.save), job.place.saved_step)
        _tell_of(passed, job.place)
        if own is not None:
            return own, True
    return _asked_for(config, job.place), False


def _asked_for(config: CheckpointConfig, place: Place) -> Path | None:
    """The checkpoint that the flags ask for, None where they ask for none."""
    if config.load is None:
        return None
    if config.ckpt_step is not None:
        directory = Path(config.load) / iteration_name(config.ckpt_step)
        reason = damage(directory)
        if reason:
            raise ConfigError(f"--ckpt-step {config.ckpt_step}: {reason}; give a step that --load {config.load} has")
        return directory
    load = Path(config.load)
    begins = with_retries(lambda: to_begin_with(load))
    found, no_pointer = begins.directory, pointer_damage(load)
    _tell_of(begins.passed, place)
    if found is not None and (no_pointer or begins.later):
        why = f"{no_pointer}: the job begins" if no_pointer else f"the job begins, as {TRACKER} says,"
        left = f" and leaves out later checkpoints (step {_listed(begins.later)}), which --ckpt-step would load"
        _tell(f"--load {load}: {why} with {found.name}{left if begins.later else ''}", place)
    if found is None and (config.exit_on_missing_checkpoint or config.finetune or begins.passed or begins.later):
        why = "; ".join(one.reason for one in begins.passed) or no_pointer or "it has no checkpoint"
        if begins.later:
            why += f"; {TRACKER} leaves out later ones (step {_listed(begins.later)}), which --ckpt-step would load"
        raise ConfigError(f"--load {config.load}: {why}; give a directory with a checkpoint, or leave --load out")
    if found is None:
        _tell(f"--load {config.load} has no checkpoint: training begins at step 0", place)
    return found


def _listed(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps))


def _tell_of(passed: Sequence[Damage], place: Place) -> None:
    for one in passed:
        _tell(f"A DAMAGED CHECKPOINT IS PASSED OVER: {one.reason}", place)


def _tell(text: str, place: Place) -> None:
    """Write a warning into the log of each group, and show it to the user once."""
    log.warning("%s", text)
    if place.group == 0 and place.run_dir is not None:
        RunDirectory(place.run_dir).notice(text)
