"""Merges the pairs of data files of a directory into one pair, in the order of their names.

The command line is that of Megatron-LM's ``tools/merge_datasets.py``, and so are the bytes. The new pair gets its name
when it is complete, the ``.idx`` last. The files of the directory stay as they are.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.plural import counted
from spare_megatron.config.version_flag import add_version
from spare_megatron.data.data_files import HEADER_BYTES, DataFile, check_file
from spare_megatron.data.preprocess.token_files import WRITE_BYTES, write_index

PROGRAM = "tools/merge_datasets.py"
EXAMPLE = """example:
  python tools/merge_datasets.py --input shards --output-prefix corpus_text_document
puts shards/a.bin and .idx, shards/b.bin and .idx, ... into corpus_text_document.bin and .idx"""


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The namespace of a command line, or ConfigError."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description=(__doc__ or "").splitlines()[0],
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_version(parser)
    parser.add_argument("--input", required=True, help="directory of the pairs of files")
    parser.add_argument("--output-prefix", required=True, help="name of the new pair, without .bin")
    parser.add_argument("--multimodal", action="store_true", help="the pairs also hold the mode of each sequence")
    args = parser.parse_args(list(words))
    for name, folder in (("input", Path(args.input)), ("output-prefix", Path(args.output_prefix).parent)):
        if not folder.is_dir():
            raise ConfigError(f"--{name} needs the directory {folder}, which does not exist; give one that does")
    return args


def pairs_of(args: argparse.Namespace) -> list[DataFile]:
    """The pairs to be merged, in order of their names; ConfigError where one is damaged, has another dtype than the
    first, or has the name of the new pair."""
    folder = Path(args.input)
    prefixes = sorted({path.stem for path in folder.iterdir() if path.suffix in (".bin", ".idx")})
    if not prefixes:
        raise ConfigError(f"--input {folder} has no .bin and .idx files; give the directory of the pairs")
    if (folder / Path(args.output_prefix).name).resolve() == Path(args.output_prefix).resolve() and (
        Path(args.output_prefix).name in prefixes
    ):
        raise ConfigError(f"--output-prefix {args.output_prefix} is one of the pairs to be merged; give another name")
    found = [check_file(str(folder / prefix), offsets=False) for prefix in prefixes]
    for one in found:
        if one.dtype != found[0].dtype:
            raise ConfigError(
                f"{one.prefix} has tokens of {one.dtype}, but {found[0].prefix} of {found[0].dtype}; merge only files "
                "of one tokenizer"
            )
    return found


def columns(pair: DataFile, multimodal: bool) -> tuple[Any, Any, Any]:
    """Of a pair: int32 tokens of each sequence, int64 sequences of each document, and int8 mode of each sequence (None
    without ``multimodal``)."""
    raw = np.memmap(f"{pair.prefix}.idx", np.uint8, "r")
    documents = int(raw[26:HEADER_BYTES].view(np.int64)[0])
    ends_at = HEADER_BYTES + 12 * pair.sequences
    modes_at = ends_at + 8 * documents
    if multimodal and len(raw) < modes_at + pair.sequences:
        raise ConfigError(f"{pair.prefix}.idx holds no modes; leave --multimodal out")
    lengths = np.frombuffer(raw, np.int32, pair.sequences, HEADER_BYTES)
    ends = np.frombuffer(raw, np.int64, documents, ends_at)
    modes = np.frombuffer(raw, np.int8, pair.sequences, modes_at) if multimodal else None
    return lengths, np.diff(ends), modes


def merge(args: argparse.Namespace) -> tuple[int, int]:
    """Write the merged pair; returns its numbers of documents and tokens."""
    pairs = pairs_of(args)
    found = [columns(pair, args.multimodal) for pair in pairs]
    lengths, documents = (np.concatenate([one[n] for one in found]) for n in (0, 1))
    modes = np.concatenate([one[2] for one in found]) if args.multimodal else None
    prefix = args.output_prefix
    parts = [Path(f"{prefix}.part.{end}") for end in ("bin", "idx")]
    try:
        with parts[0].open("wb") as whole:
            for pair in pairs:
                with Path(f"{pair.prefix}.bin").open("rb") as file:
                    shutil.copyfileobj(file, whole, WRITE_BYTES)
        write_index(parts[1], np.dtype(pairs[0].dtype), lengths, documents, modes)
        Path(f"{prefix}.idx").unlink(missing_ok=True)
        for part, end in zip(parts, ("bin", "idx"), strict=True):
            part.replace(f"{prefix}.{end}")
    finally:
        for part in parts:
            part.unlink(missing_ok=True)
    return len(documents), sum(pair.tokens for pair in pairs)


def main(words: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    try:
        args = parse(sys.argv[1:] if words is None else words)
        documents, tokens = merge(args)
    except (ConfigError, OSError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2
    print(f"{args.output_prefix}: {counted(documents, 'document')}, {counted(tokens, 'token')}")
    return 0
