"""megatron-core's tokenizers, built from flags.

megatron-core's own builder reads a namespace of flags; what it raises on a missing file or package is turned into
one sentence. Building one imports megatron-core (and torch).
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shutil
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spare_megatron.config.errors import ConfigError
from spare_megatron.megatron_adapter.core_differences import tokenizer_builder

FILES = {
    "SentencePieceTokenizer": "--tokenizer-model",
    "GPTSentencePieceTokenizer": "--tokenizer-model",
    "Llama2Tokenizer": "--tokenizer-model",
    "TikTokenizer": "--tokenizer-model",
}
"""Tokenizers that read one file, and the flag that names it. HuggingFace's may also be a name on its hub."""

PACKAGES = {"TikTokenizer": "tiktoken", "HuggingFaceTokenizer": "transformers", "GPT2BPETokenizer": "transformers"}
"""Packages that megatron-core's tokenizers need and that do not come with this framework."""

GPT2_CONFIG = {
    "tokenizer_class": "GPT2Tokenizer",
    **dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>"),
}
"""The part of the tokenizer configuration of model gpt2 on the Hugging Face hub on which ids depend."""


def imports_of(args: Namespace) -> list[str]:
    """What building this tokenizer imports beside megatron-core."""
    package = PACKAGES.get(args.tokenizer_type)
    return ["transformers.models.auto.tokenization_auto"] if package == "transformers" else []


def build_tokenizer(args: Namespace) -> Any:
    """The tokenizer that the flags describe, with ``tokenize``, ``detokenize``, ``vocab_size`` and ``eod``; ConfigError
    where it cannot be built."""
    from spare_megatron.megatron_adapter.shims import install_cpu_shims

    install_cpu_shims()
    build = tokenizer_builder()
    check_package(args)
    check_files(args)
    if args.tiktoken_special_tokens and not args.tokenizer_special_tokens:
        args.tokenizer_special_tokens = args.tiktoken_special_tokens
    reported = f"--tokenizer-type {args.tokenizer_type}"
    try:
        with gpt2_files(args):
            tokenizer = build(args)
    except (OSError, ValueError, RuntimeError, AssertionError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(
            f"{reported} cannot be built: {reason[:300]}; check --tokenizer-model and its kind"
        ) from error
    check_vocab_size(args, int(tokenizer.vocab_size))
    return tokenizer


@contextlib.contextmanager
def gpt2_files(args: Namespace) -> Iterator[None]:
    """Inside, megatron-core's GPT2BPETokenizer is built from --vocab-file and --merge-file.

    megatron-core 0.16 instead loads the model named gpt2 from the Hugging Face hub, which fails on a node without
    network and may ignore the files that the flags name. For the published files the ids are the same.
    """
    if args.tokenizer_type != "GPT2BPETokenizer":
        yield
        return
    from megatron.core.tokenizers.text.libraries.megatron_hf_tokenizer import MEGATRON_CONFIG_MAP

    entry = MEGATRON_CONFIG_MAP[args.tokenizer_type]
    name = entry["tokenizer_name"]
    with tempfile.TemporaryDirectory() as folder:
        shutil.copyfile(args.vocab_file, f"{folder}/vocab.json")
        shutil.copyfile(args.merge_file, f"{folder}/merges.txt")
        Path(folder, "tokenizer_config.json").write_text(json.dumps(GPT2_CONFIG))
        entry["tokenizer_name"] = folder
        try:
            yield
        finally:
            entry["tokenizer_name"] = name


def special_id(tokenizer: Any, name: str) -> int | None:
    """The id of the special token ``name`` (eod, bos, pad, ...), or None where the tokenizer has none: then libraries
    return None or -1, or raise an error."""
    try:
        found = getattr(tokenizer, name)
    except (AttributeError, KeyError, IndexError, NameError, TypeError, ValueError, NotImplementedError):
        return None
    return None if found is None or int(found) < 0 else int(found)


def needed_eod(tokenizer: Any, args: Namespace, flag: str) -> int:
    """The id of the token that ends a document; ConfigError where ``flag`` needs it and the tokenizer has none."""
    found = special_id(tokenizer, "eod")
    if found is None:
        raise ConfigError(
            f"{flag} needs an end-of-document token, but {args.tokenizer_model or args.tokenizer_type} "
            f"(--tokenizer-type {args.tokenizer_type}) has none; use a tokenizer with an eos token, trained with "
            "an eos_id or with an eos_token in its tokenizer_config.json, or leave the flag out"
        )
    return found


def check_vocab_size(args: Namespace, size: int) -> None:
    """ConfigError where --vocab-size differs from the number of ids of a tokenizer that defines it."""
    knows_better = args.tokenizer_type not in ("NullTokenizer", "TikTokenizer")
    if knows_better and args.vocab_size not in (None, size):
        raise ConfigError(
            f"--vocab-size is {args.vocab_size}, but {args.tokenizer_model or args.tokenizer_type} has {size} ids; "
            "leave the flag out or give the right model"
        )


def check_package(args: Namespace) -> None:
    """ConfigError where the tokenizer's package is not installed."""
    package = PACKAGES.get(args.tokenizer_type)
    if package is not None and importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"--tokenizer-type {args.tokenizer_type} needs the package {package}, which is not installed; "
            f"pip install {package}"
        )


def check_files(args: Namespace) -> None:
    """ConfigError for a file that the tokenizer needs and that is not given or does not exist."""
    needed = {}
    if args.tokenizer_type in FILES:
        needed[FILES[args.tokenizer_type]] = args.tokenizer_model
    if args.tokenizer_type == "GPT2BPETokenizer":
        needed = {"--vocab-file": args.vocab_file, "--merge-file": args.merge_file}
    if args.tokenizer_type == "HuggingFaceTokenizer" and args.tokenizer_model is None:
        needed["--tokenizer-model"] = None
    if args.tokenizer_metadata is not None:
        needed["--tokenizer-metadata"] = args.tokenizer_metadata
    for flag, path in needed.items():
        if path is None:
            raise ConfigError(f"--tokenizer-type {args.tokenizer_type} needs {flag} FILE; give it")
        if not Path(path).is_file():
            raise ConfigError(f"{flag} {path} does not exist; give the file of the tokenizer that made the data")
