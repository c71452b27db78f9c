"""The groups of spans of ``--otel-span-groups``: Megatron's names, of which a job here has some spans."""

from __future__ import annotations

from spare_megatron.config.errors import ConfigError

DEFAULT = frozenset({"job", "checkpoint", "evaluate", "first_iteration", "inference"})
PER_STEP = DEFAULT | {
    *("model_init", "load_checkpoint", "step", "forward_backward", "optimizer", "communication", "data_loading")
}
ALL = PER_STEP | {"microbatch", "layer", "activation_offload", "trace_region"}
PRESETS = {"default": DEFAULT, "per_step": PER_STEP, "all": ALL}
HERE = frozenset({"job", "checkpoint", "step"})
"""The groups that have spans here; the others are taken and add none."""


def span_groups(spec: str) -> frozenset[str]:
    """The groups of a list like 'default,step', of which there are spans here. Raises ConfigError for a name that there
    is not."""
    found = set[str]()
    for name in (part.strip() for part in spec.split(",")):
        if name not in PRESETS and name not in ALL:
            raise ConfigError(
                f"--otel-span-groups {spec} has no group {name!r}; use {', '.join(PRESETS)} or names of "
                f"{', '.join(sorted(HERE))}, with commas between them"
            )
        found |= PRESETS.get(name, {name})
    return HERE & found
