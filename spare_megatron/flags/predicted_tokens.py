"""Checks the flags of multi-token prediction, in which more layers predict the tokens after the next.

megatron-core asserts most of this where it builds the model; here it is said before a job starts. Imports neither torch
nor megatron.
"""

from __future__ import annotations

from argparse import Namespace

from spare_megatron.config.errors import ConfigError


def check_predicted(ns: Namespace) -> None:
    """ConfigError where ``--mtp-num-layers`` does not go with another flag. Assumes a resolved namespace."""
    number = ns.mtp_num_layers
    if number is None:
        return
    given = f"--mtp-num-layers {number}"
    if ns.position_embedding_type not in ("rope", "none"):
        raise ConfigError(
            f"{given} does not go with --position-embedding-type {ns.position_embedding_type}: the last pipeline stage "
            "has a copy of the word embedding only; use rope or none"
        )
    if ns.recompute_method == "uniform" and ns.recompute_num_layers != 1:
        raise ConfigError(
            f"{given} needs --recompute-num-layers 1 with --recompute-method uniform, because megatron-core recomputes "
            f"a layer of multi-token prediction by itself, and it is {ns.recompute_num_layers}; use 1"
        )
    if number >= ns.seq_length:
        raise ConfigError(f"{given} leaves no token of --seq-length {ns.seq_length} to predict; use fewer")
