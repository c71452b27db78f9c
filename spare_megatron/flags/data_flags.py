"""Derives the flags of data and of the tokenizer as Megatron does.

Imports neither torch nor megatron.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from spare_megatron.config.errors import ConfigError
from spare_megatron.flags.blends import blends, left_out


def resolve_data(ns: Namespace) -> None:
    """Read data paths from --data-args-path, and set Megatron's defaults of --split and --dataloader-type."""
    if ns.data_args_path is not None:
        if ns.data_path is not None:
            raise ConfigError("--data-path and --data-args-path say the same thing; give one of them")
        # --spare-check needs no data files: it lists those that do not exist
        if not ns.spare_check or Path(ns.data_args_path).exists():
            ns.data_path = read_words(Path(ns.data_args_path), "--data-args-path")
    if (ns.data_path is not None or ns.data_args_path is not None) and ns.split is None:
        ns.split = "969, 30, 1"
    per_split = ns.per_split_data_args_path
    elsewhere = names_no_data(ns) or (per_split is not None and not Path(per_split).exists())
    if not (ns.spare_check and elsewhere):
        blends(ns)  # refuses what is no blend before anything starts
        ns.spare_notes += tuple(left_out(ns))
    if ns.dataloader_type is None:
        ns.dataloader_type = "single"
    _check_fill_in_middle(ns)


def _check_fill_in_middle(ns: Namespace) -> None:
    if not ns.fim_data:
        return
    if ns.mock_data:
        raise ConfigError("--fim-data needs documents, and --mock-data has none; give --data-path")
    for flag, value in (("rate", ns.fim_rate), ("spm-rate", ns.fim_spm_rate), ("fragment-rate", ns.fim_fragment_rate)):
        if value is not None and not 0.0 <= value <= 1.0:
            raise ConfigError(f"--fim-{flag} is {value:g}, but it is a share; give a value from 0 to 1")
    if (ns.fim_split_sample is None) != (ns.fim_fragment_rate is None):
        raise ConfigError("--fim-split-sample and --fim-fragment-rate belong together; give both or none")


def names_no_data(ns: Namespace) -> bool:
    """Whether ``--data-path`` is there without a value: a variable of the user's script was empty."""
    return bool(ns.data_path == [])


def resolve_names(ns: Namespace) -> None:
    """Set the destinations that flags of the tokenizer have in newer versions of Megatron, for scripts that make a
    tokenizer of them; those that a script's own flags have are its own. The vocabulary is padded here, not by them."""
    ns.pad_vocab_size = False
    ns.tokenizer_hf_no_use_fast = not ns.tokenizer_hf_use_fast
    ns.tokenizer_hf_no_include_special_tokens = not ns.tokenizer_hf_include_special_tokens
    for name, value in (("metadata_path", ns.tokenizer_metadata), ("special_tokens", ns.tokenizer_special_tokens)):
        if not hasattr(ns, name):
            setattr(ns, name, value)


def read_words(path: Path, name: str) -> list[str]:
    try:
        return path.read_text().split()
    except OSError as error:
        raise ConfigError(f"{name} {path} cannot be read: {error.strerror}; give a file that exists") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{name} {path} is not text: {error.reason} at byte {error.start}; write weights and prefixes into it"
        ) from None
