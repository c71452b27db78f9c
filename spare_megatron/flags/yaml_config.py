"""``--yaml-cfg``: turns a file in Megatron's YAML format into the words of a command line.

Such a file names destinations of flags (``num_layers``), at the top or inside sections (``language_model``,
``model_parallel``), where fields of megatron-core's TransformerConfig are allowed too. Null, and values that are
Megatron's defaults, set no flag. ``${NAME}`` is replaced from the environment. Megatron ignores the command line beside
such a file; here flags on the command line are read after the file's and override them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from spare_megatron.config.errors import ConfigError
from spare_megatron.flags.specs import core_table, megatron_table, own_specs
from spare_megatron.flags.supported import nearest_of

FLAG = "--yaml-cfg"

# field of megatron-core -> destination of the flag that sets it
_OTHER_NAMES = {"num_moe_experts": "num_experts"}
_ACTIVATIONS = {"swiglu": "swiglu", "silu": "swiglu", "squared_relu": "squared_relu", "gelu": None}
# fields that are derived from other flags here, so that the file's values are ignored
_DERIVED = frozenset(
    (
        "_cpu_offloading_context",
        "async_tensor_model_parallel_allreduce",
        "autocast_dtype",
        "barrier_with_L1_time",
        "batch_p2p_comm",
        "batch_p2p_sync",
        "bert_binary_head",
        "bias_activation_fusion",
        "cpu_offloading_activations",
        "cpu_offloading_weights",
        "deallocate_pipeline_outputs",
        "enable_autocast",
        "enable_one_logger",
        "finalize_model_grads_func",
        "fp8_wgrad",
        "gated_linear_unit",
        "grad_scale_func",
        "grad_sync_func",
        "gradient_accumulation_fusion",
        "init_method",
        "memory_efficient_layer_norm",
        "moe_token_dropping",
        "no_sync_func",
        "one_logger_project",
        "output_layer_init_method",
        "overlap_p2p_comm",
        "param_sync_func",
        "params_dtype",
        "persist_layer_norm",
        "pipeline_dtype",
        "scatter_gather_tensors_in_pipeline",
        "standalone_embedding_stage",
        "timers",
        "tp_comm_atomic_ag",
        "tp_comm_atomic_rs",
        "transformer_pipeline_model_parallel_size",
        "variable_seq_lengths",
        "virtual_pipeline_model_parallel_size",
    )
)
_VARIABLE = re.compile(r"\$\{(\w+)\}")


def with_yaml(words: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """The words with each ``--yaml-cfg FILE`` replaced by what the file says, in front of all others."""
    front: list[str] = []
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        name, _, value = word.partition("=")
        if name != FLAG:
            kept.append(word)
            continue
        path = value or next(rest, "")
        if not path:
            raise ConfigError(f"{FLAG} takes a file, as in {FLAG} config.yaml")
        front += words_of_file(Path(path), environ)
    return front + kept


def words_of_file(path: Path, environ: Mapping[str, str]) -> list[str]:
    """The command-line words for a file's settings."""
    import yaml

    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"{FLAG} {path} cannot be read: {error.strerror}; give a file that exists") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{FLAG} {path} is not text: {error.reason} at byte {error.start}; give a file of YAML"
        ) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        where = " ".join(str(error).split())
        raise ConfigError(
            f"{FLAG} {path} is not YAML: {where}; compare it with Megatron-LM's gpt_config.yaml"
        ) from None
    if not isinstance(content, dict):
        raise ConfigError(f"{FLAG} {path} has no names with values; write lines such as 'num_layers: 24'")
    words: list[str] = []
    for name, value in _flat(content):
        words += _words(path, name, _filled(path, name, value, environ))
    return words


def _flat(content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        if isinstance(value, dict):
            yield from _flat(value)
        else:
            yield str(name), value


def _filled(path: Path, name: str, value: Any, environ: Mapping[str, str]) -> Any:
    """``value`` with each ``${NAME}`` replaced from the environment."""
    if not isinstance(value, str):
        return value

    def of(match: re.Match[str]) -> str:
        if match[1] not in environ:
            raise ConfigError(f"{path}: {name} is {value!r}, but {match[1]} is not in the environment; export it")
        return environ[match[1]]

    return _VARIABLE.sub(of, value)


def _words(path: Path, name: str, value: Any) -> list[str]:
    if value is None or value == "" or name in _DERIVED:
        return []
    if name == "activation_func":
        return _activation(path, value)
    dest = _OTHER_NAMES.get(name, name)
    own = {spec.dest: (spec.names[0], spec.kind, spec.default) for spec in own_specs()}
    row = megatron_table().get(dest)
    if row is None and dest not in own:
        return _field(path, name, value)
    flag, kind, default = own[dest] if row is None else (row["names"][0], row["kind"], row["default"])
    if kind in ("on", "off"):
        if not isinstance(value, bool):
            raise ConfigError(f"{path}: {name} is {value!r}, but takes true or false")
        return [flag] if value == (kind == "on") else []
    if value == default or (value is False and default is None):
        return []
    values = value if isinstance(value, list) else str(value).split() if _takes_several(row) else [value]
    return [flag, *map(str, values)]


def _takes_several(row: Mapping[str, Any] | None) -> bool:
    return bool(row and row.get("nargs"))


def _activation(path: Path, value: Any) -> list[str]:
    if not isinstance(value, str) or value not in _ACTIVATIONS:
        raise ConfigError(f"{path}: activation_func {value!r} is not supported; use one of {', '.join(_ACTIVATIONS)}")
    flag = _ACTIVATIONS[value]
    return [f"--{flag}"] if flag else []


def _field(path: Path, name: str, value: Any) -> list[str]:
    """The words for a field of megatron-core that no flag sets: none; ConfigError where it is not its default."""
    fields = {row["field"]: row["default"] for row in core_table()["fields"]}
    if name not in fields:
        shown = name if name.isidentifier() else repr(name)
        raise ConfigError(f"{path}: there is no setting {shown}{nearest_of(name, [*megatron_table(), *fields])}")
    if value != fields[name]:
        raise ConfigError(
            f"{path}: {name} {value!r} is not supported: no flag sets it; leave it out or use {fields[name]!r}"
        )
    return []
