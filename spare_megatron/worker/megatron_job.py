"""Builds and runs one rank of a Megatron job: tokenizer, world, model, checkpoint, data, engine, training loop.

What can be refused without other ranks (files, vocabulary) is checked first, so that the user is notified at once.
"""

from __future__ import annotations

import logging
import math
import os
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from spare_megatron import kernels
from spare_megatron.checkpoint.folder import Retention
from spare_megatron.checkpoint.saved_args import plain
from spare_megatron.collectives.reduction import Bfloat16Reduction, PlainReduction
from spare_megatron.config.errors import ConfigError
from spare_megatron.config.exits import ExitCode
from spare_megatron.config.injection import check_flips
from spare_megatron.config.job import JobDescription, Plain
from spare_megatron.config.place import Place, place_of
from spare_megatron.config.span_groups import span_groups
from spare_megatron.control_plane.leader_process import start_ahead
from spare_megatron.data.data_files import DataFile, check_data, data_identity, looked_at
from spare_megatron.data.dataset_build import Datasets, build_datasets, build_enough, sample_counts
from spare_megatron.data.microbatch_loader import evaluation_source, validation_batch
from spare_megatron.flags.blends import blends
from spare_megatron.flags.optimizer_flags import package_used
from spare_megatron.megatron_adapter import core_differences, versions
from spare_megatron.megatron_adapter.checkpoint import group_checkpoint
from spare_megatron.megatron_adapter.checkpoint.checkpoint_writer import TorchDistShare
from spare_megatron.megatron_adapter.determinism import arithmetic, make_deterministic
from spare_megatron.megatron_adapter.json_collectives import agree, gather_json
from spare_megatron.megatron_adapter.megatron_engine import MegatronEngine
from spare_megatron.megatron_adapter.model.gloo_device import LOOPBACK
from spare_megatron.megatron_adapter.model.home_rows import check_home
from spare_megatron.megatron_adapter.model.losses import averages
from spare_megatron.megatron_adapter.model.replica import Replica, build_replica
from spare_megatron.megatron_adapter.model.settings import MegatronSettings
from spare_megatron.megatron_adapter.model.world import EmbeddingRanks, GroupWorld, init_group_world
from spare_megatron.megatron_adapter.shims import compute_device
from spare_megatron.placement import Placement, build_placement
from spare_megatron.protocol.messages import JobSpec
from spare_megatron.runtime.import_variables import set_too_late
from spare_megatron.runtime.run_directory import RunDirectory
from spare_megatron.runtime.script_sources import source_digests
from spare_megatron.worker import user_state
from spare_megatron.worker.carried_state import CarryingEngine, carried
from spare_megatron.worker.devices import around_the_world, check_alike, check_standbys, replica_backend
from spare_megatron.worker.evaluation import EvaluatingEngine, Evaluation
from spare_megatron.worker.fault_injection import Injector
from spare_megatron.worker.flops import flops_per_step
from spare_megatron.worker.group_store import GroupStore
from spare_megatron.worker.hooks import hooks_of
from spare_megatron.worker.job_arguments import JobArguments
from spare_megatron.worker.job_loaders import JobLoaders, check_same_data, stage
from spare_megatron.worker.memory_forecast import shapes_that_fit
from spare_megatron.worker.progress import append_progress, saved_text
from spare_megatron.worker.rendezvous import group_store, on_one_host
from spare_megatron.worker.reporting import ReportingEngine
from spare_megatron.worker.save_mail import SaveMail
from spare_megatron.worker.saved_choice import leave_choice
from spare_megatron.worker.saving import GroupSaver
from spare_megatron.worker.shard_gather import GatheringEngine, ShardGather
from spare_megatron.worker.start import Start, load_start
from spare_megatron.worker.start_times import StartTimes
from spare_megatron.worker.tokenizer import build_tokenizer
from spare_megatron.worker.waiting import log_as, wait_for_place
from spare_megatron.worker.warm_up import warm_update
from spare_megatron.worker.worker import RankJob, train_rank

log = logging.getLogger(__name__)

START_TIMEOUT_S = 300.0
PER_RANK = frozenset({"rank", "local_rank"})
"""Names in the namespace whose values differ between ranks, and so are no part of the job's identity."""


class UserCode(Protocol):
    """What the user's script gives to ``pretrain``."""

    @property
    def datasets_provider(self) -> Callable[..., Any]:
        """Makes the training, validation and test data sets."""

    @property
    def model_provider(self) -> Callable[..., Any] | None:
        """Makes a model, or a chunk of one; None: the GPT of the flags."""

    @property
    def forward_step(self) -> Callable[..., Any]:
        """Computes the loss of a microbatch."""

    @property
    def get_embedding_ranks(self) -> Callable[..., list[int]] | None:
        """Chooses the pipeline ranks with word embeddings; None: the first and the last."""

    @property
    def get_position_embedding_ranks(self) -> Callable[..., list[int]] | None:
        """Chooses those with position embeddings; None: the first."""


@dataclass(frozen=True)
class _CheckedJob:
    """A job of which everything that needs no other rank has been checked."""

    job: JobArguments
    args: Namespace
    settings: MegatronSettings
    placement: Placement
    files: list[DataFile]
    data: Mapping[str, Plain]
    """What decides which samples are read, beside the flags: equal on all ranks of the job."""
    injector: Injector
    times: StartTimes

    @property
    def exact(self) -> bool:
        """Whether gradients are summed in fixed point."""
        return self.job.spare.reduce.startswith("exact")


@dataclass(frozen=True)
class _LoadedJob:
    """The job in its group's world, with the model as the checkpoint has it."""

    checked: _CheckedJob
    store: GroupStore
    world: GroupWorld
    replica: Replica
    start: Start


@dataclass(frozen=True)
class _BuiltJob:
    """The job with its data and its engine, which could compute a piece."""

    loaded: _LoadedJob
    datasets: Datasets
    loaders: JobLoaders
    engine: MegatronEngine


def run_megatron_job(job: JobArguments, args: Namespace, user: UserCode) -> ExitCode:
    """Run this rank to its end; returns its exit code. Raises ConfigError for what the user can mend.

    A rank of a standby waits for its place when it has done all that does not depend on it."""
    return _train(_build(_load(_check(job, args), user), user))


def _check(job: JobArguments, args: Namespace) -> _CheckedJob:
    """Check what needs no other rank, and set this process up for the job."""
    place, times = job.place, StartTimes()
    if place.run_dir is None:
        raise ConfigError("this rank has no run directory; start it with spare-launch, or give --spare-run-dir DIR")
    times.done("imports and flags")
    source_digests()  # now: a standby waits for its place, and meanwhile its user changes the file
    late = set_too_late(os.environ)
    if late:
        log.warning(
            "the script has set %s after the imports that read it, which spare-launch makes once for all ranks; set it "
            "for spare-launch, or give --spare-preload none",
            ", ".join(late),
        )
    check_standbys(job)
    if job.spare.reduce.startswith("exact"):
        make_deterministic()
    tokenizer = build_tokenizer(args)
    placement = build_placement(job.shape.num_groups, job.redundancy, job.spare.placement)
    if place.restarts:  # perhaps on a host that has read none of this before
        stage(job, placement.stack_of(place.group))
    files = check_data(args, int(tokenizer.vocab_size))
    # a command that brings shards writes tokens into the files later
    data = {"the blends": str(blends(args)), **data_identity(files, whole=job.spare.stage_command is None)}
    settings = job.settings(args.padded_vocab_size)
    injector = Injector.from_environment(os.environ, place)
    check_flips(injector.injections, job.spare.reduce, job.spare.audit_rate)
    user_state.begin(job, args, tokenizer)
    return _CheckedJob(job, args, settings, placement, files, data=data, injector=injector, times=times)


def _load(checked: _CheckedJob, user: UserCode) -> _LoadedJob:
    """Form the group's world, build the model and load the checkpoint. Collective in the group."""
    job, settings, times = checked.job, checked.settings, checked.times
    place = job.place
    store = group_store(place, START_TIMEOUT_S, job.spare.interface or "")
    with around_the_world(job):
        world = init_group_world(
            job.here,
            place.position,
            store,
            virtual_pipeline=settings.virtual_pipeline,
            expert=settings.expert,
            expert_tensor=settings.expert_tensor,
            backend=job.training.distributed_backend,
            device=place.local_rank % torch.cuda.device_count() if torch.cuda.is_available() else None,
            timeout_s=job.training.distributed_timeout_minutes * 60.0,
            pipeline_before_data=job.training.use_tp_pp_dp_mapping,
            hierarchical_context=settings.get("hierarchical_context_parallel_sizes"),
            embeddings=EmbeddingRanks(user.get_embedding_ranks, user.get_position_embedding_ranks),
            gloo_host=LOOPBACK if on_one_host(store, place) else "",
        )
    bits = arithmetic() if checked.exact else {}
    ranks = gather_json({"bits": bits, "data": checked.data}, compute_device())
    check_alike([rank["bits"] for rank in ranks])
    check_same_data([rank["data"] for rank in ranks])
    times.done("world")
    replica = build_replica(settings, world, user.model_provider)
    times.done("model")
    start = load_start(job, checked.args, replica)
    times.done("checkpoint")
    return _LoadedJob(checked, store, world, replica, start)


def _build(loaded: _LoadedJob, user: UserCode) -> _BuiltJob:
    """Make the data sets, their loaders and the engine; the first rank says what the job is like."""
    checked, world, start = loaded.checked, loaded.world, loaded.start
    job, args, place = checked.job, checked.args, checked.job.place
    args.iteration, args.consumed_train_samples = start.step, start.consumed_samples
    if place.group == 0 and place.is_leader and not place.place_file:
        _announce(checked)
    needed = start.batches(job).consumed_before(job.train_iters + 1)
    train_samples, valid_samples, test_samples = sample_counts(job.train_iters, args)

    def build(samples: int) -> Datasets:
        return build_datasets(
            user.datasets_provider,
            (samples, valid_samples, test_samples),
            args,
            checked.files,
            leads=place.is_leader,
            chunks=checked.settings.virtual_pipeline,
            tensor_rank=world.tensor_rank,
        )

    once = job.data.dataloader_type == "single"
    datasets = build_enough(
        build, train_samples, needed if once else 0, lambda lacks: any(gather_json(lacks, compute_device()))
    )
    loaders = JobLoaders(job, args, world, checked.placement, start, checked.files)
    engine = MegatronEngine(
        loaded.replica,
        world,
        user.forward_step,
        loaders.make("training", datasets.train, needed),
        probe_piece=place.group * job.shape.pieces_per_shard,
        method=job.spare.reduce,
        flips=checked.injector.flips if checked.injector.has_flips else None,
        batches=start.batches(job),
        first_step=start.step,
        state_shards=start.shards(job),
        rows=job.rows_here,
        cut=job.cut,
    )
    if job.spare.shapes != "none" and not job.place.stages:
        _check_cut(job, user, loaded)
    if engine.exact is not None:
        engine.exact.restore(start.rank_state, start.read_rank_states)
    return _BuiltJob(loaded, datasets, loaders, engine)


def _check_cut(job: JobArguments, user: UserCode, loaded: _LoadedJob) -> None:
    """ConfigError where the groups of a job cannot come back in smaller shapes."""
    if user.get_embedding_ranks is not None:
        raise ConfigError(
            f"--spare-shapes {job.spare.shapes}: get_embedding_ranks chooses among the stages of the home shape; leave "
            "one of them out"
        )
    check_home(loaded.replica.chunks, loaded.replica.config, job.cut.home, loaded.world.pipeline_rank)


def _train(built: _BuiltJob) -> ExitCode:
    """Wait for a place where this rank has none, join the job, and train to its end."""
    loaded, loaders, engine = built.loaded, built.loaders, built.engine
    checked, start = loaded.checked, loaded.start
    job, args, times = checked.job, checked.args, checked.times
    carrying = CarryingEngine(engine, carried())
    waited = bool(job.place.place_file)
    if waited:
        times.done("data and engine")
        if job.divides_state:
            engine.shards.keep((), {})
        warm_update(engine, start.step + 1, 0)
        _lead_ahead(job.place)
        job = _placed(job, args)
        checked.injector.move(job.place)
        loaders.move(job.place.group)
        times.done("wait for a place")
    if start.step and not job.place.restarts:
        carrying.restore(start.rank_state, start.read_rank_states)
    hooks, end_hooks = hooks_of(job, loaded.replica)
    gather = None
    if job.divides_state:
        saves = job.checkpoint.save is not None and not job.checkpoint.no_save_optim
        gather = ShardGather(engine.shards, carrying, start.step, checked.injector.fire, saves=saves)
    gathering = carrying if gather is None else GatheringEngine(carrying, gather)
    reporting = ReportingEngine(gathering, hooks, job.logging.log_timers_to_tensorboard)
    evaluating = _evaluating(job, reporting, loaders, built.datasets, start)
    description = _description(checked, job, start)
    rank = RankJob(
        job.place,
        _spec(job, checked.placement, start, evaluating.last_round, description),
        description,
        replica_backend(job),
        compute_device(),
        method=Bfloat16Reduction() if job.spare.reduce == "bf16" else PlainReduction(),
        overlap=job.training.overlap_grad_reduce,
        coordinator=job.spare.coordinator or "",
        interface=job.spare.interface or "",
        transfer_rate_bytes_s=job.transfer_rate_bytes_s,
        warm=waited,
        rank_times=job.spare.rank_times,
        shards=gather,
    )
    times.done("rest" if waited else "data and engine")
    log.info("%s", times.sentence)
    try:
        saver = _saver(job, args, engine, carrying, start=start, store=loaded.store, gather=gather)
        return train_rank(rank, evaluating, saver, checked.injector, loaders.open)
    finally:
        end_hooks()
        loaders.close()


def _announce(checked: _CheckedJob) -> None:
    """Log what the user should know of the job, and note its start in the progress file."""
    job = checked.job
    for sentence in (checked.placement.reason, *job.notes, *looked_at(checked.files)):
        log.info("%s", sentence)
    slow = kernels.why_slow(compute_device().type) if checked.exact else ""
    if slow:
        log.warning("%s", slow)
    if not job.place.restarts:
        _pass_on_deprecations(RunDirectory(str(job.place.run_dir)))
    append_progress(job, "Starting job")


def _pass_on_deprecations(run_dir: RunDirectory) -> None:
    """Show once what megatron-core has said of models that it will give up; the job trains them all the same."""
    for text in core_differences.deprecations:
        run_dir.notice(f"megatron-core {versions.core_version()} says: {text}")


def _lead_ahead(place: Place) -> None:
    """Start the process of the group's leader, where this rank will need one."""
    if place.is_leader and place.group_size > 1:
        start_ahead()


def _placed(job: JobArguments, args: Namespace) -> JobArguments:
    """Wait until this process has its place; returns the job with it."""
    wait_for_place(os.environ)
    shape = job.shape
    place = place_of(os.environ, shape.num_groups, shape.group_size, job.place.run_dir)
    args.rank = place.group * shape.group_size + place.position
    log_as(place)
    return replace(job, place=place)


def _evaluating(
    job: JobArguments, engine: ReportingEngine, loaders: JobLoaders, datasets: Datasets, start: Start
) -> EvaluatingEngine:
    """``engine`` with the evaluations for which there are flags and data. Collective in the group."""
    iterations, interval = job.evaluation.eval_iters, job.evaluation.eval_interval
    mine = (datasets.valid is not None, datasets.test is not None)
    there = gather_json(mine, compute_device())
    batch, final = job.shape.global_batch_size, job.train_iters
    passes: list[Evaluation] = []
    during: list[Evaluation] = []
    if iterations and any(valid for valid, _ in there):
        rounds = (final // interval if interval else 0) + 1
        valid = loaders.make("validation", datasets.valid, rounds * iterations * batch)

        def validation(state: int, iteration: int) -> Any:
            number = validation_batch(state, iteration, iterations, interval, final=state == final)
            return evaluation_source(valid, number)

        passes.append(Evaluation("validation", iterations, validation))
        during = passes[:1]
    if iterations and any(test for _, test in there):
        test = loaders.make("test", datasets.test, iterations * batch)
        passes.append(Evaluation("test", iterations, lambda _state, iteration: evaluation_source(test, iteration)))
    last = _last_step(job, start)
    return EvaluatingEngine(engine, last, interval, during, passes if last == final else (), averages)


def _last_step(job: JobArguments, start: Start) -> int:
    """The step with which this run ends: the job's last one, or the next multiple of --exit-interval."""
    interval = job.training.exit_interval
    if interval is None:
        return job.train_iters
    return min(job.train_iters, (start.step // interval + 1) * interval)


def _spec(
    job: JobArguments, placement: Placement, start: Start, last_round: int, description: JobDescription
) -> JobSpec:
    timeouts = job.timeouts
    return JobSpec(
        num_groups=job.shape.num_groups,
        pieces_per_shard=job.shape.pieces_per_shard,
        offsets=placement.offsets,
        granularity=job.spare.granularity,
        first_step=start.step,
        last_step=last_round,
        min_groups=job.spare.min_groups or 1,
        fingerprint=description.fingerprint,
        heartbeat_timeout_s=timeouts.heartbeat_timeout_s,
        audit_rate=job.spare.audit_rate,
        audit_seed=job.training.seed,
        save_every=job.save_every,
        emergency_saves=job.checkpoint.save is not None and not job.spare.no_emergency_save,
        adoption=not job.spare.no_adoption,
        state_shards=start.shards(job) if job.divides_state else 0,
        state_copies=job.spare.state_redundancy or 0,
    )


def _description(checked: _CheckedJob, job: JobArguments, start: Start) -> JobDescription:
    args = checked.args
    identity: dict[str, Plain] = {"torch": str(torch.__version__), "megatron-core": versions.core_version()}
    identity |= package_used(args)
    identity |= {f"the source of {file}": digest for file, digest in source_digests().items()}
    identity |= checked.data
    identity["state shards"] = start.shards(job)
    if job.spare.reduce.startswith("exact"):
        identity |= arithmetic()
    for name, value in sorted(vars(args).items()):
        if name not in PER_RANK:
            identity[name] = value if isinstance(value, str | int | float | bool | None) else str(value)
    logs = job.logging
    return JobDescription(
        identity=identity,
        timeouts=job.timeouts,
        tuning=job.tuning,
        train_iters=job.train_iters,
        log_interval=logs.log_interval,
        global_batch_size=job.shape.global_batch_size,
        seq_length=job.seq_length,
        consumed_samples=start.consumed_samples,
        state_shards=start.shards(job),
        saves_into=job.place.saves_into(job.checkpoint.save),
        world_size=job.shape.world_size,
        device=compute_device().type,
        late_pauses=job.spare.schedule == "tickets",
        tickets_ahead=job.shape.pipeline + 1 if job.spare.relief else 0,
        adopt_timeout_s=job.spare.adopt_timeout_s,
        smaller_shapes=shapes_that_fit(args, job.shape, args.padded_vocab_size, _device_bytes()),
        flops_per_step=flops_per_step(args) if logs.log_throughput else 0.0,
        tensorboard_dir=logs.tensorboard_dir or "",
        batch_phases=start.batches(job).phases if job.batches.changes else (),
        pieces_per_shard=job.shape.pieces_per_shard,
        exit_duration_s=60.0 * (job.training.exit_duration_in_mins or 0),
        tensorboard_log_interval=logs.tensorboard_log_interval,
        tensorboard_queue_size=logs.tensorboard_queue_size,
        board_extras=_board_extras(job),
        wandb_project=logs.wandb_project or "",
        wandb_exp_name=logs.wandb_exp_name or "",
        wandb_save_dir=logs.wandb_save_dir or "",
        wandb_entity=logs.wandb_entity or "",
        otel_enabled=logs.otel_enabled,
        otel_service_name=logs.otel_service_name or "",
        otel_span_groups=tuple(sorted(span_groups(logs.otel_span_groups or "default"))),
    )


def _device_bytes() -> float:
    """The memory of this rank's GPU; without limit where it computes on the processor."""
    if not torch.cuda.is_available():
        return math.inf
    return float(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)


def _board_extras(job: JobArguments) -> tuple[str, ...]:
    """What TensorBoard and W&B get in addition to what every job writes there."""
    logs = job.logging
    wanted = {
        "loss-scale": logs.log_loss_scale_to_tensorboard,
        "validation-ppl": logs.log_validation_ppl_to_tensorboard,
        "timers": logs.log_timers_to_tensorboard,
        "memory": logs.log_memory_to_tensorboard,
        "world-size": logs.log_world_size_to_tensorboard,
    }
    return tuple(name for name, there in wanted.items() if there)


def _saver(
    job: JobArguments,
    args: Namespace,
    engine: MegatronEngine,
    carrying: CarryingEngine,
    *,
    start: Start,
    store: GroupStore,
    gather: ShardGather | None,
) -> GroupSaver | None:
    config, place = job.checkpoint, job.place
    if config.save is None:
        return None
    flags = plain(vars(args))
    batches = start.batches(job)
    checkpointer = group_checkpoint.Checkpointer(engine.replica, optimizer=not config.no_save_optim)
    checkpointer.check()

    def take(step: int, directory: Path, copied: bool) -> TorchDistShare:
        consumed = batches.consumed_before(step + 1)
        iterations, interval = job.evaluation.eval_iters, job.evaluation.eval_interval
        evaluated = validation_batch(step, 0, iterations, interval, final=True)  # batches until then
        kept = carrying.with_states(engine.exact.state if engine.exact is not None else None)
        return checkpointer.take(
            directory,
            step=step,
            consumed_samples=consumed,
            consumed_valid_samples=evaluated * job.shape.global_batch_size,
            args=flags,
            rank_state=kept,
            state_shards=engine.shards.number,
            whole=engine.shards.whole(gather.state_to_save())
            if gather is not None and not config.no_save_optim
            else None,
            copied=copied,
        )

    def published(step: int) -> None:
        append_progress(job, saved_text(job, step, batches.consumed_before(step + 1), flops_per_step(args)))

    return GroupSaver(
        Path(config.save),
        place,
        job.train_iters,
        take,
        partial(agree, device=compute_device()),
        SaveMail(store.client.another(), place.position, place.group_size),
        asynchronous=not job.spare.no_async_save,
        retention=Retention(config.save_retain_interval, job.spare.keep_checkpoints),
        notice=RunDirectory(str(place.run_dir)).notice,
        complete=partial(leave_choice, place),
        published=published,
        hung_s=job.timeouts.hung_s,
    )
