"""Finds the packages and hardware that a job's flags need, and writes the report of ``--spare-check``.

A job refuses to start where something is missing. ``--spare-check`` only lists it, because it may run on a laptop for a
job that is meant for a cluster. Imports torch only to find out whether there is CUDA.
"""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.flags import flag_name
from spare_megatron.config.plural import counted
from spare_megatron.config.shape import JobShape
from spare_megatron.flags import core_versions, hybrid_pattern
from spare_megatron.flags.data_flags import names_no_data
from spare_megatron.flags.optimizer_flags import CORE_OF_EMERGING, EMERGING, PACKAGE
from spare_megatron.flags.specs import CORE_SECTIONS, SECTIONS
from spare_megatron.flags.stage_layout import CORE_OF_SMALLER_UNITS, cut_of, uneven_sizes
from spare_megatron.flags.supported import all_specs
from spare_megatron.megatron_adapter.versions import TESTED, check_core_version

ENGINE_MODULES = ("layernorm", "moe_act", "mla_up_proj")
"""Modules whose selective recomputation uses transformer-engine without a check that it is installed."""

DATA_FLAGS = (
    *("mock_data", "data_path", "data_args_path", "per_split_data_args_path"),
    *("train_data_path", "valid_data_path", "test_data_path"),
)
"""Flags that name data or ask for made-up data."""


@dataclass(frozen=True)
class Need:
    """A package or hardware ``what`` that flag ``why`` needs when the job runs; ``fix`` says what to do without it."""

    what: str
    why: str
    there: Callable[[], bool]
    fix: str


def has_package(name: str) -> Callable[[], bool]:
    def there() -> bool:
        try:
            return importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:  # of the package that it is in
            return False

    return there


def has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def needs(ns: Namespace) -> Iterable[Need]:
    """The packages and hardware that the flags need."""
    engine = "transformer-engine"
    install = "pip install 'spare_megatron[transformer-engine]'"
    if ns.transformer_impl == "transformer_engine":
        yield Need(engine, "--transformer-impl transformer_engine", has_package("transformer_engine"), install)
        yield Need("CUDA", "--transformer-impl transformer_engine", has_cuda, "use --transformer-impl local")
    if ns.context_parallel_size > 1 and ns.transformer_impl is None:
        why = f"--context-parallel-size {ns.context_parallel_size}"
        yield Need(engine, why, has_package("transformer_engine"), "use --context-parallel-size 1, or " + install)
        yield Need("CUDA", why, has_cuda, "use --context-parallel-size 1")
    if ns.attention_backend in ("flash", "fused"):
        why = f"--attention-backend {ns.attention_backend}"
        yield Need(engine, why, has_package("transformer_engine"), "use --attention-backend auto, or " + install)
    if ns.fp8 is not None:
        yield Need(engine, f"--fp8-format {ns.fp8}", has_package("transformer_engine"), "use --bf16, or " + install)
        yield Need("CUDA of compute capability 8.9 or more", f"--fp8-format {ns.fp8}", has_cuda, "use --bf16")
    if ns.experimental_attention_variant is not None:
        why = f"--experimental-attention-variant {ns.experimental_attention_variant}"
        yield Need(engine, why, has_package("transformer_engine"), "leave it out, or " + install)
        yield Need("flash-linear-attention", why, has_package("fla"), "leave it out, or pip install it")
    if ns.moe_grouped_gemm:
        yield Need("CUDA", "--moe-grouped-gemm", has_cuda, "leave --moe-grouped-gemm out")
    for name in ("use_transformer_engine_op_fuser", "fused_residual_rmsnorm", "fp8_output_proj"):
        if getattr(ns, name):
            yield Need(engine, flag_name(name), has_package("transformer_engine"), "leave it out")
    if ns.otel_enabled:
        there = has_package("opentelemetry.exporter.otlp.proto.http")
        yield Need("OpenTelemetry", "--otel-enabled", there, "pip install 'spare_megatron[otel]'")
    if ns.optimizer in EMERGING:
        why = f"--optimizer {ns.optimizer}"
        yield core_since(CORE_OF_EMERGING, why, "install it (it needs Python 3.12), or use --optimizer adam")
        here = has_package(PACKAGE.replace("-", "_"))
        yield Need(PACKAGE, why, here, f"pip install {PACKAGE}, or use --optimizer adam")
    yield from hybrid_needs(ns)
    uneven = [] if ns.hybrid_layer_pattern else uneven_sizes(ns, cut_of(ns))
    if uneven:
        why = f"--recompute-num-layers {ns.recompute_num_layers} with a stage of {counted(uneven[0], 'layer')}"
        fix = "use --recompute-num-layers 1, or another number that divides the layers of each stage"
        yield core_since(CORE_OF_SMALLER_UNITS, why, fix)
    yield from other_cores(ns)
    here = has_package("transformer_engine") if ns.transformer_impl != "local" else (lambda: False)
    for why, fix in engine_only(ns):
        yield Need(engine, why, here, fix)
    if ns.distributed_backend == "nccl" or ns.spare_comm == "nccl":
        why = "--distributed-backend nccl" if ns.distributed_backend == "nccl" else "--spare-comm nccl"
        yield Need("CUDA", why, has_cuda, f"use {why.split()[0]} gloo")
    if ns.fp32_residual_connection:
        yield Need("CUDA", "--fp32-residual-connection", has_cuda, "leave it out")
    for name, package in (("TikTokenizer", "tiktoken"), ("HuggingFaceTokenizer", "transformers")):
        if ns.tokenizer_type == name:
            yield Need(package, f"--tokenizer-type {name}", has_package(package), f"pip install {package}")
    if ns.tokenizer_type == "GPT2BPETokenizer":
        yield Need("transformers", "--tokenizer-type GPT2BPETokenizer", has_package("transformers"), "pip install it")


def core_since(core: tuple[int, int], why: str, fix: str) -> Need:
    """A megatron-core of this version or a later one."""
    what = core_versions.in_words([minor for minor in core_versions.tables() if minor >= core])
    return Need(what, why, lambda: core_versions.installed() >= core, fix)


def hybrid_needs(ns: Namespace) -> Iterable[Need]:
    """What the layers of a hybrid model need. Those that only other packages have are also transformer-engine's."""
    pattern = hybrid_pattern.pattern_of(ns)
    if pattern is None:
        return
    yield core_since(hybrid_pattern.CORE, hybrid_pattern.FLAG, "install it (it needs Python 3.12)")
    for symbol, module, package in hybrid_pattern.packages(pattern):
        fix = f"pip install {package} on a machine with CUDA, or use * in place of {symbol}"
        yield Need(package, hybrid_pattern.layers_text(symbol), has_package(module), fix)


def other_cores(ns: Namespace) -> Iterable[Need]:
    """The versions of megatron-core that flags need: the installed one lacks their field or value, or fails with it."""
    for spec in all_specs():
        value = getattr(ns, spec.dest)
        if spec.section not in CORE_SECTIONS or value == spec.default:
            continue
        what = core_versions.needed(spec.dest, value)
        if what:
            why = spec.names[0] if spec.kind in ("on", "off") else f"{spec.names[0]} {value}"
            yield Need(what, why, lambda: False, "install it, or leave the flag out")
    ranks, groups = ns.tensor_model_parallel_size, ns.num_query_groups
    if ns.attention_output_gate and ns.group_query_attention and groups < ranks:
        # 0.16 gives a rank the gates of all heads of a query group of which it has some
        why = f"--attention-output-gate with --num-query-groups {groups} and --tensor-model-parallel-size {ranks}"
        fix = f"install it, or use --tensor-model-parallel-size {groups}"
        yield core_since((0, 17), why, fix)


def engine_only(ns: Namespace) -> Iterable[tuple[str, str]]:
    """(flag, what to do instead) for each given flag that only transformer-engine's layers support (seen with
    megatron-core 0.16.1)."""
    if ns.num_experts is not None and ns.add_bias_linear and has_cuda():  # without CUDA a shim makes it run
        # megatron-core's experts add the bias in place to the output of a collective, which autograd refuses
        yield "--num-experts with biases", "add --disable-bias-linear"
    pattern = hybrid_pattern.pattern_of(ns)
    for symbol in hybrid_pattern.OF_ENGINE:
        if pattern is not None and pattern.count(symbol):
            yield hybrid_pattern.layers_text(symbol), f"use * in place of {symbol}"
    if ns.moe_latent_size is not None:
        yield f"--moe-latent-size {ns.moe_latent_size}", "leave it out"
    if ns.multi_latent_attention and has_cuda():  # without CUDA a shim makes it run
        yield "--multi-latent-attention", "use --group-query-attention"
    elif ns.multi_latent_attention and ns.tensor_model_parallel_size > 1:
        # of what all heads share, local layers give each rank the gradient of its own heads
        why = f"--multi-latent-attention with --tensor-model-parallel-size {ns.tensor_model_parallel_size}"
        yield why, "use --tensor-model-parallel-size 1"
    if ns.layernorm_zero_centered_gamma:
        yield "--apply-layernorm-1p", "leave it out"
    if ns.use_te_activation_func:
        yield "--use-te-activation-func", "leave it out"
    if ns.cross_entropy_loss_fusion and ns.cross_entropy_fusion_impl == "te":
        yield "--cross-entropy-fusion-impl te", "use native"
    modules = [name for name in ns.recompute_modules or () if name in ENGINE_MODULES]
    if modules:
        yield f"--recompute-modules {' '.join(modules)}", "use core_attn, mlp or moe"


def check_machine(ns: Namespace) -> None:
    """ConfigError for the first need that this machine does not meet."""
    check_core_version(ns.spare_allow_untested_core)
    for need in needs(ns):
        if not need.there():
            raise ConfigError(f"{need.why} needs {need.what}, which is not on this machine; {need.fix}")


def files_named(ns: Namespace) -> list[Path]:
    """The files that the job will read because a flag names them."""
    named = [ns.tokenizer_model, ns.vocab_file, ns.merge_file, ns.tokenizer_metadata, ns.load, ns.data_args_path]
    paths = [Path(name) for name in named if name is not None]
    return paths + data_paths(ns)


def data_paths(ns: Namespace) -> list[Path]:
    """The data files that flags name, or the file that is to name them where it is not here."""
    from spare_megatron.flags.blends import blends

    if names_no_data(ns):
        return []
    if ns.per_split_data_args_path is not None and not Path(ns.per_split_data_args_path).exists():
        return [Path(ns.per_split_data_args_path)]
    blend, per_split = blends(ns)
    prefixes = [prefix for part in (blend, *(per_split or [])) if part for prefix in part[0]]
    return [Path(f"{prefix}{end}") for prefix in prefixes for end in (".bin", ".idx")]


def model_elsewhere(ns: Namespace) -> str:
    """The text of ``--spare-check`` where the model's flags are in a checkpoint that another machine has; empty where
    they are known."""
    taken = ns.spare_taken
    if taken is None or taken.found or taken.where.exists() or ns.num_layers or ns.encoder_num_layers:
        return ""
    lines = [
        "nothing is wrong with the flags that are here, and the model's are not: look again where the checkpoint is",
        "the job needs:",
        f"  a checkpoint in {taken.where}, for --use-checkpoint-args (not here)",
    ]
    return "\n".join([*lines, *_without_effect(ns)]) + "\n"


def _changes(ns: Namespace) -> bool:
    return ns.rampup_batch_size is not None or ns.step_batch_size_schedule is not None


def _without_effect(ns: Namespace) -> list[str]:
    notes = [f"  {note}" for note in ns.spare_notes]
    return ["flags that are accepted and change nothing:", *notes] if notes else []


def report(ns: Namespace, shape: JobShape, redundancy: int, chosen: str = "", forecast: Iterable[str] = ()) -> str:
    """The text of ``--spare-check``: the job's shape, why it was ``chosen`` so where it was, what the job needs, the
    lines of a ``forecast``, and every flag's resolved value."""
    lines = [
        "the flags are good",
        f"  {counted(shape.num_groups, 'group')} of {counted(shape.group_size, 'rank')} (TP {shape.tensor} x PP "
        f"{shape.pipeline} x CP {shape.context} x inner data {shape.inner_data}), {counted(shape.world_size, 'rank')}",
        f"  {counted(shape.pieces_per_shard, 'piece')} per shard, each shard on {counted(redundancy, 'group')}; "
        f"{counted(shape.pieces, 'piece')} of {counted(shape.piece_microbatches, 'microbatch', 'microbatches')}, "
        f"{counted(shape.piece_samples, 'sample')}, per step; "
        f"{counted(ns.train_iters, 'step')} of {'at most ' if _changes(ns) else ''}"
        f"{counted(shape.global_batch_size, 'sample')}",
        *([f"  {chosen}"] if chosen else []),
        "the job needs:",
        f"  {counted(shape.world_size, 'rank')}, one process each",
        f"  megatron-core {TESTED}",
    ]
    lines += [f"  {need.what}, for {need.why}" + ("" if need.there() else " (not here)") for need in needs(ns)]
    lines += [f"  {path}" + ("" if path.exists() else " (not here)") for path in files_named(ns)]
    if names_no_data(ns):
        lines.append("  data files, for --data-path, which names none (not here)")
    elif not any(getattr(ns, name) for name in DATA_FLAGS):
        lines.append("  data from the script's own provider, as no flag names data")
    lines += forecast
    taken = ns.spare_taken
    if taken is not None:
        lines.append(f"from the checkpoint {taken.where}:" if taken.found else taken.sentences()[0])
        lines += [f"  {name} = {value}" for name, value in taken.values.items()]
        lines += [f"  {sentence}" for sentence in taken.differences]
    lines += _without_effect(ns)
    titles = {name: title for name, (title, _) in SECTIONS.items()} | CORE_SECTIONS
    shown = ""
    for spec in all_specs():
        if spec.section != shown:
            shown = spec.section
            lines.append(f"{titles[shown]}:")
        lines.append(f"  {spec.dest} = {getattr(ns, spec.dest)}")
    return "\n".join(lines) + "\n"
