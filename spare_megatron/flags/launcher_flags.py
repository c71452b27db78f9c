"""The few flags that a launcher must know before any rank reads them all, read from the same table by the same parser.

Ranks read and check the flags as a whole. What a launcher does not know (flags of the user's own, mistakes) it leaves
to them.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.flags import flag_name
from spare_megatron.config.spare import SpareConfig
from spare_megatron.flags.checkpoint_args import SavedArgs, degrees
from spare_megatron.flags.parser import Parser, add_flag
from spare_megatron.flags.supported import all_specs
from spare_megatron.flags.validate import check_operation
from spare_megatron.flags.yaml_config import with_yaml

DEGREES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "spare_inner_data_parallel",
)
OTHERS = (
    "save",
    "load",
    "ckpt_step",
    "spare_run_dir",
    "spare_max_group_restarts",
    "spare_on_event",
    "spare_health_check",
    "spare_group_restart_pause_s",
    "spare_standby_groups",
    "spare_preload",
    "use_checkpoint_args",
    "use_mp_args_from_checkpoint_args",
)


@dataclass(frozen=True)
class LauncherFlags:
    """What the flags of a rank say to its launcher."""

    group_size: int = 1
    """M, ranks of a group."""
    run_dir: str | None = None
    max_group_restarts: int = 0
    """How often one lost group is started again within an hour; 0: it stays lost."""
    on_event: str = ""
    """The operator's command, which the coordinator runs for each event of the job; empty: none."""
    health_check: str = ""
    """The user's command before a lost group is started again; empty: none."""
    save_dir: str = ""
    """Where checkpoints are written; empty: nowhere."""
    load_dir: str = ""
    """Where the job begins with a checkpoint; empty: it begins at step 0."""
    ckpt_step: int | None = None
    """The step of that checkpoint; None: the newest."""
    group_restart_pause_s: float = SpareConfig.group_restart_pause_s
    """How long the second restart of a group within an hour waits."""
    standby_groups: int = 0
    """Groups that wait for the places of lost ones."""
    preload: str = ""
    """Further modules that ranks need not import, separated by commas; 'none': they import everything themselves."""
    pipeline: int = 1
    """Pipeline stages of a group."""


def launcher_flags(words: Sequence[str], environ: Mapping[str, str], saved: SavedArgs) -> LauncherFlags:
    """Read a rank's command line, with its ``--yaml-cfg`` and ``--use-mp-args-from-checkpoint-args``.

    Raises:
        ConfigError: a value that is none, a degree of parallelism below 1, fewer than no restarts or
            standbys, standbys where nothing is started again, a pause below 0, or an empty command.
    """
    parser = Parser(add_help=False, allow_abbrev=False)
    for spec in all_specs():
        if spec.dest in DEGREES + OTHERS:
            # a script of another kind may have a flag of this name that takes no value
            add_flag(parser, replace(spec, nargs="?") if spec.kind == "str" else spec, "")
    namespace, _ = parser.parse_known_args(with_yaml(words, environ))
    for name, value in degrees(namespace, saved).items():
        setattr(namespace, name, value)
    check_operation(namespace)
    return LauncherFlags(
        group_size=group_size(namespace),
        run_dir=namespace.spare_run_dir,
        max_group_restarts=namespace.spare_max_group_restarts,
        on_event=namespace.spare_on_event or "",
        health_check=namespace.spare_health_check or "",
        save_dir=namespace.save or "",
        load_dir=namespace.load or "",
        ckpt_step=namespace.ckpt_step,
        group_restart_pause_s=namespace.spare_group_restart_pause_s,
        standby_groups=namespace.spare_standby_groups,
        preload=namespace.spare_preload or "",
        pipeline=namespace.pipeline_model_parallel_size,
    )


def group_size(namespace: argparse.Namespace) -> int:
    """M = TP x PP x CP x D; D as said, or the least for which EP x expert-TP fits into TP x CP x D."""
    for name in DEGREES:
        value = getattr(namespace, name)
        if isinstance(value, int) and value < 1:
            raise ConfigError(f"{flag_name(name)} is {value}, but must be at least 1")
    tensor, context = namespace.tensor_model_parallel_size, namespace.context_parallel_size
    expert = namespace.expert_model_parallel_size * (namespace.expert_tensor_parallel_size or tensor)
    inner = namespace.spare_inner_data_parallel
    data = inner if isinstance(inner, int) else expert // math.gcd(expert, tensor * context)
    return int(tensor * namespace.pipeline_model_parallel_size * context * data)
