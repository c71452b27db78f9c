"""Derives and checks the flags of the optimizer.

Muon, Lion and SOAP come from the package emerging-optimizers, and are built by the factory that megatron-core has since
0.18 for its optimizers. Each rank of a group has the state of all of its weights. AdEMAMix is this framework's own.
Imports neither torch nor megatron.
"""

from __future__ import annotations

import importlib.metadata
from argparse import Namespace

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.shape import JobShape
from spare_megatron.flags.resolve import at_least

EMERGING = ("muon", "lion", "soap")
PACKAGE = "emerging-optimizers"
CORE_OF_EMERGING = (0, 18)
SPLIT = ("adam", "ademamix")
"""The optimizers whose state --use-distributed-optimizer divides over the inner ranks of a group."""
COEFFICIENTS = ("simple", "quintic", "polar_express", "cans", "aol", "deepseekv4")
"""The coefficients of Newton-Schulz iterations that emerging-optimizers 0.3 knows by name."""


def resolve_optimizer(ns: Namespace, shape: JobShape) -> None:
    """Give older names of flags and values their newer ones, and say what the optimizer does not do as Megatron."""
    if ns.optimizer == "dist_muon":  # it divides whole weights over data-parallel ranks, with the same update
        ns.optimizer = "muon"
        ns.spare_notes += ("--optimizer dist_muon: each rank of a group updates all of its weights, as with muon",)
    if ns.muon_use_nesterov:
        ns.muon_use_nesterov, ns.muon_nesterov = False, True
    if ns.optimizer == "lion" and {"--lion-beta1", "--lion-beta2"} & set(ns.spare_given):
        ns.spare_notes += (
            "--lion-beta1 and --lion-beta2: megatron-core reads them with --muon-scalar-optimizer lion; --optimizer "
            "lion has --adam-beta1 and --adam-beta2",
        )
    if ns.optimizer in EMERGING and splits(ns, shape):
        ns.use_distributed_optimizer = False
        ns.spare_notes += (
            f"--use-distributed-optimizer: the state of --optimizer {ns.optimizer} is whole on each rank of a group",
        )


def package_used(ns: Namespace) -> dict[str, str]:
    """The package that the optimizer is from and its version, which all groups of a job must have; empty for none."""
    return {PACKAGE: importlib.metadata.version(PACKAGE)} if ns.optimizer in EMERGING else {}


def splits(ns: Namespace, shape: JobShape) -> bool:
    """Whether a group divides its optimizer's state over its inner ranks."""
    return bool(ns.use_distributed_optimizer) and shape.inner_data * shape.context > 1


def check_state_redundancy(ns: Namespace, shape: JobShape) -> None:
    """ConfigError where groups cannot keep parts of the optimizer's state as --spare-state-redundancy says."""
    copies, groups = ns.spare_state_redundancy, shape.num_groups
    if copies is None or copies == groups:
        return
    flag = f"--spare-state-redundancy {copies}"
    if not 1 <= copies <= groups:
        raise ConfigError(
            f"{flag} is not between 1 and the {groups} groups of the job; use --spare-state-redundancy "
            f"{min(max(copies, 1), groups)} or more groups"
        )
    divides = f"with {flag} each of the {groups} groups keeps a part of the optimizer's state, and"
    if ns.optimizer == "soap":
        raise ConfigError(
            f"{divides} the factors that --optimizer soap has for each matrix are not divided; use another, or leave "
            "--spare-state-redundancy out"
        )
    if ns.log_params_norm and (ns.bf16 or ns.fp16):
        ns.spare_notes += (
            f"--log-params-norm: with {flag} of the weights in {'bf16' if ns.bf16 else 'fp16'}, because no group has "
            "all of the fp32 ones",
        )


def check_optimizer(ns: Namespace, shape: JobShape) -> None:
    """ConfigError where a flag of the optimizer has no good value, or does not go with another. Assumes a resolved
    namespace."""
    if splits(ns, shape) and ns.optimizer not in SPLIT:
        raise ConfigError(
            "--use-distributed-optimizer splits the state of Adam and AdEMAMix over inner data ranks, not that of "
            f"--optimizer {ns.optimizer}; use --optimizer adam or leave the flag out"
        )
    if ns.optimizer in EMERGING and ns.fp16:
        raise ConfigError(f"--optimizer {ns.optimizer} does not go with --fp16 in megatron-core; use --bf16")
    if ns.optimizer == "muon" and ns.muon_coefficient_type not in COEFFICIENTS:
        raise ConfigError(
            f"--muon-coefficient-type is {ns.muon_coefficient_type!r}, but {PACKAGE} knows {', '.join(COEFFICIENTS)}"
        )
    at_least(ns, 1, "muon_num_ns_steps")
    if not 0.0 <= ns.ademamix_beta3 < 1.0:
        raise ConfigError(f"--ademamix-beta3 is {ns.ademamix_beta3}, but must be in 0 <= x < 1, as in 0.9999")
    if ns.ademamix_alpha < 0.0:
        raise ConfigError(f"--ademamix-alpha is {ns.ademamix_alpha}, but must be at least 0, as in 8")
    at_least(ns, 0, "ademamix_alpha_warmup", "ademamix_beta3_warmup")
