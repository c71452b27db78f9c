"""The only place where a rank reads flags: makes one frozen :class:`JobArguments` of a command line and an environment.

:func:`parse_job` imports neither torch nor megatron, even where it takes flags from a checkpoint. So a bad flag is
refused at once, by a ConfigError with one sentence. Beside the frozen sections it returns the flat namespace with
Megatron's names, which users' own code reads through ``get_args()``.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from spare_megatron.checkpoint.saved_args import check_format, saved_args
from spare_megatron.config import sections
from spare_megatron.config.batches import BatchPlan
from spare_megatron.config.byte_units import rate_of
from spare_megatron.config.errors import ConfigError
from spare_megatron.config.place import STAGES, Place, number, place_of, world_hint
from spare_megatron.config.plain_words import check_words
from spare_megatron.config.rows import RowCut, rows_of, shape_of
from spare_megatron.config.shape import JobShape
from spare_megatron.config.spare import SpareConfig
from spare_megatron.config.timeouts import Timeouts, timeouts_from
from spare_megatron.config.tuning import Tuning
from spare_megatron.flags import check, checkpoint_args, data_flags, parser, resolve, supported, validate
from spare_megatron.flags.batch_flags import batch_plan
from spare_megatron.flags.optimizer_flags import resolve_optimizer
from spare_megatron.flags.specs import core_specs, core_table, own_specs
from spare_megatron.flags.stage_layout import row_cut_of
from spare_megatron.megatron_adapter.model.settings import MegatronSettings, check_settings
from spare_megatron.worker.piece_choice import likely_vocabulary, with_pieces
from spare_megatron.worker.saved_choice import redundancy_of

__all__ = ["JobArguments", "parse_job"]

MIXED_FIELDS = (
    "no_rope_freq",
    "window_size",
    "window_attn_skip_freq",
    "linear_attention_freq",
    "moe_layer_freq",
    "moe_router_load_balancing_type",
    "moe_aux_loss_coeff",
    "pipeline_model_parallel_layout",
)
"""Fields of TransformerConfig whose flags take values of several types."""


@dataclass(frozen=True)
class JobArguments:
    """What a rank reads from its flags and its environment."""

    shape: JobShape
    place: Place
    spare: SpareConfig
    training: sections.TrainingConfig
    model: sections.ModelConfig
    schedule: sections.ScheduleConfig
    ademamix: sections.AdemamixConfig
    data: sections.DataConfig
    tokenizer: sections.TokenizerConfig
    evaluation: sections.EvaluationConfig
    checkpoint: sections.CheckpointConfig
    logging: sections.LoggingConfig
    transformer: Mapping[str, Any]
    """Fields of megatron-core's TransformerConfig, by plain values."""
    optimizer: Mapping[str, Any]
    """Fields of megatron-core's OptimizerConfig, by plain values."""
    ddp: Mapping[str, Any]
    """Fields of megatron-core's DistributedDataParallelConfig, by plain values."""
    scheduler: Mapping[str, Any]
    """Arguments of megatron-core's OptimizerParamScheduler; lengths in samples."""
    train_iters: int
    """Steps of the job, also where the flags give samples."""
    batches: BatchPlan
    cut: RowCut
    """The division of the layers over the stages of the home shape, and into rows."""
    max_position_embeddings: int
    seq_length: int
    words: tuple[str, ...]
    """The command line as it was given."""
    redundancy: int
    """r, as given, or what ``auto`` is in this job attempt."""
    notes: tuple[str, ...] = ()
    """Sentences to be logged once, about flags that change nothing here and about what was taken from a checkpoint."""

    @property
    def here(self) -> JobShape:
        """The shape of this rank's group: that of the flags, or with fewer pipeline stages."""
        return shape_of(self.shape, self.place.stages)

    @property
    def rows_here(self) -> list[int]:
        """This rank's rows by their numbers in :attr:`cut`; empty where each rank of its group has a whole stage of
        home."""
        inner = self.shape.group_size // self.shape.pipeline
        return [row // inner for row in self.place.rows[self.place.position]] if self.place.rows else []

    @property
    def divides_state(self) -> bool:
        """Whether a group keeps only a part of the optimizer's state."""
        return self.spare.state_redundancy not in (None, self.shape.num_groups)

    @property
    def save_every(self) -> int:
        """The steps of --save-interval; 0 where it is auto or not given, or there is no --save."""
        every = self.checkpoint.save_interval
        return every if isinstance(every, int) and self.checkpoint.save is not None else 0

    @property
    def tuning(self) -> Tuning:
        """What the job decides about itself while it runs, and what it needs for that."""
        spare, saves = self.spare, self.checkpoint.save is not None
        return Tuning(
            save_interval=self.checkpoint.save_interval == "auto" and saves,
            redundancy=spare.redundancy is None and saves,
            restart_after=self._restart_after,
            mtbf_gpu_hours=spare.mtbf_gpu_hours,
            group_size=self.shape.group_size,
            shared_data=spare.data == "shared",
            groups_return=spare.max_group_restarts > 0 and self.place.starts_again,
            standby_groups=spare.standby_groups,
            adopt_s=None if spare.no_adoption else spare.adopt_timeout_s,
            can_restart=saves and self.place.starts_again and not self.checkpoint.no_save_optim,
        )

    @property
    def _restart_after(self) -> int | None:
        """The losses after which a restart is planned; None: the job decides, 0: never.

        The job compares the measured cost of a restart with training on fewer groups. Under Slurm a restart may have to
        wait in the queue for new nodes, nobody knows how long; so there it is planned only after a given number."""
        after = self.spare.restart_after
        return 0 if after is None and self.place.launcher == "slurm" else after

    @property
    def timeouts(self) -> Timeouts:
        """The control plane's time-outs."""
        return timeouts_from(self.spare.heartbeat_timeout_s, self.spare.progress_timeout_s)

    @property
    def transfer_rate_bytes_s(self) -> float:
        """The most that a rank gives a second to groups that come back; 0 for no limit."""
        rate = self.spare.transfer_rate
        return 0.0 if rate is None else rate_of("--spare-transfer-rate", rate)

    def settings(self, padded_vocab_size: int) -> MegatronSettings:
        """What the adapter builds a model from; the size of the vocabulary is known once the tokenizer is built."""
        model, stages = self.model, self.place.stages
        return MegatronSettings(
            transformer={**self.transformer, **(self.cut.home.with_stages(stages).fields() if stages else {})},
            optimizer=self.optimizer,
            ademamix=dataclasses.asdict(self.ademamix) if self.optimizer["optimizer"] == "ademamix" else None,
            scheduler=self.scheduler,
            padded_vocab_size=padded_vocab_size,
            seq_length=self.seq_length,
            max_position_embeddings=self.max_position_embeddings,
            ddp=self.ddp,
            untie_embeddings_and_output_weights=model.untie_embeddings_and_output_weights,
            position_embedding_type=model.position_embedding_type,
            rotary_percent=model.rotary_percent,
            rotary_base=model.rotary_base,
            rotary_seq_len_interpolation_factor=model.rotary_seq_len_interpolation_factor,
            use_rope_scaling=model.use_rope_scaling,
            rope_scaling_factor=model.rope_scaling_factor,
            fp16_lm_cross_entropy=model.fp16_lm_cross_entropy,
            hybrid_layer_pattern=model.hybrid_layer_pattern,
            spec=model.spec or (),
            transformer_impl=model.transformer_impl or "auto",
            experimental=model.enable_experimental,
            seed=self.training.seed,
            divides_state=self.divides_state,
            schedule=self.spare.schedule,
        )


def parse_job(
    words: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
    extra_args_provider: parser.ExtraArguments | None = None,
    args_defaults: Mapping[str, Any] | None = None,
) -> tuple[JobArguments, Namespace]:
    """The job and the namespace of a command line (default: ``sys.argv``) and an environment (default: empty).

    ``--help`` prints the flags and exits with 0; ``--spare-check`` prints its report after the checks and exits with 0.
    The caller turns ConfigError into exit code 2.
    """
    words = tuple(sys.argv[1:] if words is None else words)
    check_words(words)
    environ = environ or {}
    if "--help" in words or "-h" in words:
        sys.stdout.write(parser.help_text(extra_args_provider))
        raise SystemExit(0)

    def parsed(words: Sequence[str]) -> Namespace:
        return parser.parse(words, extra_args_provider, args_defaults, environ, saved_args)

    namespace = parsed(words)
    with checkpoint_args.explained(namespace.spare_taken):
        if namespace.spare_check:
            _report(namespace, words, environ, parsed)
        job, _ = _resolved_job(namespace, words, environ)
        check.check_machine(namespace)
        check_settings(job.settings(namespace.padded_vocab_size or 1), job.here)
        return job, namespace


def _resolved_job(namespace: Namespace, words: tuple[str, ...], environ: Mapping[str, str]) -> tuple[JobArguments, str]:
    """Resolve the namespace of a command line, check it against every rule but those of the machine and of
    megatron-core, and freeze it; and why its pieces have their size."""
    hint = world_hint(environ)
    resolve.resolve_model(namespace)
    resolve.resolve_stages(namespace)
    shape = resolve.resolve_shape(namespace, hint)
    resolve_optimizer(namespace, shape)
    resolve.explain_inner(namespace, shape)
    resolve.explain_auto(namespace)
    resolve.resolve_training(namespace, shape)
    data_flags.resolve_data(namespace)
    data_flags.resolve_names(namespace)
    validate.check_all(namespace, shape)
    if namespace.load is not None:
        check_format(Path(namespace.load), namespace.ckpt_step)
    shape, why = with_pieces(namespace, shape, batch_plan(namespace, shape).schedule())
    stages = number(environ, STAGES) or 0
    place = place_of(environ, shape.num_groups, shape_of(shape, stages).group_size, namespace.spare_run_dir)
    cut = row_cut_of(namespace)
    if stages and stages not in cut.shapes:
        allowed = ", ".join(map(str, cut.shapes)) or "no smaller shape"
        raise ConfigError(
            f"the environment variable {STAGES} is {stages}, but --spare-shapes {namespace.spare_shapes} allows "
            f"{allowed}; spare-launch and spare-slurm set it, leave it out elsewhere"
        )
    if stages or not cut.is_home:
        there = stages or shape.pipeline
        rows = tuple(rows_of(shape, cut, there, position) for position in range(place.group_size))
        place = dataclasses.replace(place, stages=stages, rows=rows)
    _check_parked(namespace, place)
    if namespace.spare_shapes != "none" and place.launcher == "torchrun":
        raise ConfigError(
            f"--spare-shapes {namespace.spare_shapes} is for spare-launch and spare-slurm: torchrun starts a group "
            "again with all its ranks; leave it out"
        )
    namespace.world_size = shape.world_size
    namespace.rank = place.group * shape.group_size + place.position
    namespace.data_parallel_size = shape.num_groups * shape.inner_data
    return job_of(namespace, shape, place, words, notes=(why,) if why else ()), why


def _report(
    namespace: Namespace,
    words: tuple[str, ...],
    environ: Mapping[str, str],
    parsed: Callable[[Sequence[str]], Namespace],
) -> NoReturn:
    """Write what ``--spare-check`` says of a command line, and exit. Raises ConfigError for one that is refused."""
    if text := check.model_elsewhere(namespace):
        sys.stdout.write(text)
        raise SystemExit(0)
    from spare_megatron.worker.memory_forecast import memory_items, memory_lines  # they need numpy
    from spare_megatron.worker.return_forecast import return_lines

    def settled(namespace: Namespace, words: tuple[str, ...]) -> tuple[JobArguments, str]:
        job, why = _resolved_job(namespace, words, environ)
        # the report lists what this machine lacks: check the settings as on a machine that has it
        likely = job.model.transformer_impl or "transformer_engine"
        settings = dataclasses.replace(job.settings(namespace.padded_vocab_size or 1), transformer_impl=likely)
        check_settings(settings, job.shape)
        return job, why

    def total_with(flags: str) -> float:
        longer = (*words, *flags.split())
        try:
            other = parsed(longer)
            shape = settled(other, longer)[0].shape
        except ConfigError:
            return math.inf
        return sum(memory_items(other, shape, likely_vocabulary(other)).values())

    job, why = settled(namespace, words)
    shape, vocabulary = job.shape, likely_vocabulary(namespace)
    if not data_flags.names_no_data(namespace) and all(path.exists() for path in check.data_paths(namespace)):
        from spare_megatron.data.data_files import check_data

        check_data(namespace, None)
    forecast = [*memory_lines(namespace, shape, vocabulary, total_with), *return_lines(namespace, shape, vocabulary)]
    sys.stdout.write(check.report(namespace, shape, job.redundancy, why, forecast))
    raise SystemExit(0)


def job_of(
    namespace: Namespace, shape: JobShape, place: Place, words: tuple[str, ...], notes: tuple[str, ...] = ()
) -> JobArguments:
    """The frozen sections of a resolved namespace; ``notes``: what else the job says when it starts."""
    taken, batches = namespace.spare_taken, batch_plan(namespace, shape)
    return JobArguments(
        shape=shape,
        place=place,
        spare=section(SpareConfig, namespace, "spare_"),
        training=section(sections.TrainingConfig, namespace),
        model=section(sections.ModelConfig, namespace),
        schedule=section(sections.ScheduleConfig, namespace),
        ademamix=section(sections.AdemamixConfig, namespace),
        data=section(sections.DataConfig, namespace),
        tokenizer=section(sections.TokenizerConfig, namespace),
        evaluation=section(sections.EvaluationConfig, namespace),
        checkpoint=section(sections.CheckpointConfig, namespace),
        logging=section(sections.LoggingConfig, namespace),
        transformer=transformer_fields(namespace),
        optimizer=core_fields(namespace, "OptimizerConfig"),
        ddp=ddp_fields(namespace),
        scheduler=resolve.scheduler_fields(namespace, batches),
        train_iters=namespace.train_iters,
        batches=batches,
        cut=row_cut_of(namespace),
        notes=(
            *(taken.sentences() if taken else ()),
            *namespace.spare_notes,
            *_restart_note(namespace, place),
            *_launcher_notes(namespace, place),
            *notes,
        ),
        max_position_embeddings=namespace.max_position_embeddings,
        seq_length=namespace.seq_length,
        words=words,
        redundancy=redundancy_of(namespace.spare_redundancy, shape.num_groups, namespace.spare_data, place),
    )


def _restart_note(namespace: Namespace, place: Place) -> tuple[str, ...]:
    """A sentence where planned restarts were asked for and this job's launcher does not carry them out."""
    after = namespace.spare_restart_after
    if not after or place.starts_again or place.launcher == "none":
        return ()
    return (f"--spare-restart-after {after}: no restart is planned; only spare-launch and spare-slurm carry them out",)


def _check_parked(namespace: Namespace, place: Place) -> None:
    """Refuse processes that wait for a place where nobody would start them."""
    count = namespace.spare_standby_groups
    if count and place.launcher != "spare-launch" and not namespace.spare_check:
        raise ConfigError(
            f"--spare-standby-groups {count} is for spare-launch, which has not started this rank: nobody would start "
            "what is to wait; leave it out"
        )


def _launcher_notes(namespace: Namespace, place: Place) -> Iterator[str]:
    """Sentences where flags were given that this job's launcher does not carry out."""
    command, check = namespace.spare_on_event, namespace.spare_health_check
    preload = namespace.spare_preload
    if preload is not None and place.launcher not in ("spare-launch", "none"):
        yield f"--spare-preload {preload}: only spare-launch forks ranks; here each makes its own imports"
    if place.starts_again or place.launcher == "none":
        return
    if command is not None:
        yield f"--spare-on-event {command!r} is for spare-launch and spare-slurm; give spare-coordinator --on-event CMD"
    if check is not None:
        yield f"--spare-health-check {check!r} is for spare-launch and spare-slurm; no lost group is started again here"


def section(cls: type, namespace: Namespace, prefix: str = "") -> Any:
    """An instance of ``cls`` with the values that the namespace has for its fields; lists become tuples."""
    values = {field.name: getattr(namespace, prefix + field.name) for field in dataclasses.fields(cls)}
    return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


@functools.cache
def honoured_fields() -> frozenset[str]:
    """The destinations of flags that have an effect, ours and megatron-core's."""
    own, core = ({spec.dest for spec in specs} for specs in (own_specs(), core_specs(set())))
    refused = core - {spec.dest for spec in supported.all_specs()}
    return frozenset((own | core) - refused)


def core_fields(namespace: Namespace, *classes: str) -> dict[str, Any]:
    """The fields of megatron-core dataclasses that Megatron's flags or our own set."""
    names = [row["field"] for row in core_table()["fields"] if row["class"] in classes]
    return {name: getattr(namespace, name) for name in names if name in honoured_fields()}


def transformer_fields(ns: Namespace) -> dict[str, Any]:
    """The fields of TransformerConfig as Megatron fills it from its flags; dtypes, functions and enums stay names."""
    fields = core_fields(ns, "TransformerConfig", *(["MLATransformerConfig"] if ns.multi_latent_attention else []))
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
        fields.pop(name)
    # fields of several types, which the table of one-word fields leaves out
    fields |= {name: getattr(ns, name) for name in MIXED_FIELDS}
    fields |= {
        "virtual_pipeline_model_parallel_size": ns.virtual_pipeline_model_parallel_size,
        "num_moe_experts": ns.num_experts,
        "num_query_groups": ns.num_query_groups if ns.group_query_attention else None,
        "persist_layer_norm": not ns.no_persist_layer_norm,
        "deallocate_pipeline_outputs": True,
        "batch_p2p_comm": not ns.overlap_p2p_comm,
        "num_layers_in_first_pipeline_stage": ns.decoder_first_pipeline_num_layers,
        "num_layers_in_last_pipeline_stage": ns.decoder_last_pipeline_num_layers,
        "gated_linear_unit": ns.swiglu or ns.quick_geglu,
        "bias_activation_fusion": not ns.squared_relu and (ns.bias_swiglu_fusion if ns.swiglu else ns.bias_gelu_fusion),
        "gradient_accumulation_fusion": False,
        "cuda_graph_scope": [],
        "fp8_param": ns.fp8_param_gather,
        "cp_comm_type": ns.cp_comm_type[0] if len(ns.cp_comm_type) == 1 else ns.cp_comm_type,
    }
    words = {"swiglu": "silu", "squared_relu": "squared_relu", "quick_geglu": "quick_gelu"}
    for name in (name for name in words if getattr(ns, name)):
        fields["activation_func"] = words[name]
    if ns.init_method_xavier_uniform:
        fields |= {"init_method": "xavier_uniform", "output_layer_init_method": "xavier_uniform"}
    if not ns.multi_latent_attention or ns.rope_type is None:
        fields.pop("rope_type", None)
    if ns.position_embedding_type == "yarn":
        fields |= {
            "yarn_rotary_scaling_factor": ns.rotary_scaling_factor,
            "yarn_original_max_position_embeddings": ns.yarn_original_max_position_embeddings,
            "yarn_beta_fast": 32.0 if ns.yarn_beta_fast is None else ns.yarn_beta_fast,
            "yarn_beta_slow": 1.0 if ns.yarn_beta_slow is None else ns.yarn_beta_slow,
            "yarn_mscale": ns.mscale,
            "yarn_mscale_all_dim": ns.mscale_all_dim,
            "yarn_correction_range_round_to_int": ns.yarn_correction_range_round_to_int is not False,
        }
    fields["use_cpu_initialization"] = bool(ns.use_cpu_initialization)
    fields.pop("transformer_impl", None)
    return fields


def ddp_fields(ns: Namespace) -> dict[str, Any]:
    """The fields of DistributedDataParallelConfig; that of the check for finite gradients is named unlike its flag."""
    fields = core_fields(ns, "DistributedDataParallelConfig")
    # Megatron's instances of a distributed optimizer are our groups, each a world of its own; and our own reduction
    # over groups overlaps the backward pass, not megatron-core's inside a group
    for name in ("num_distributed_optimizer_instances", "overlap_grad_reduce"):
        fields.pop(name)
    return {**fields, "check_for_nan_in_grad": ns.check_for_nan_in_loss_and_grad}
