"""From JSON lines to data files: tokenizes the text of each document and writes it in megatron-core's format.

The command line is that of Megatron-LM's ``tools/preprocess_data.py``. The pair of files of a key appears when it is
complete, ``PREFIX_KEY_document.bin`` first and ``.idx`` last, so an interrupted run leaves no pair that looks whole.
The order of the documents is that of the input, whatever the number of workers; with ``--partitions P`` it is
Megatron's: documents are dealt out to P parts in turn and the parts follow one another.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import multiprocessing
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.sections import TokenizerConfig
from spare_megatron.training.flags import refusals
from spare_megatron.training.flags.parser import Parser, add_flag, nearest_of
from spare_megatron.training.flags.specs import docs_of, specs_of

PROGRAM = "tools/preprocess_data.py"
EXAMPLE = """example:
  python tools/preprocess_data.py --input corpus.jsonl --output-prefix corpus --append-eod --workers 4 \\
    --tokenizer-type SentencePieceTokenizer --tokenizer-model tokenizer.model
writes corpus_text_document.bin and corpus_text_document.idx; train with --data-path corpus_text_document"""

REFUSED = {
    "--split-sentences": ("sentences are for BERT, and only decoder-only models are trained here", "leave it out"),
    "--keep-newlines": ("it belongs to --split-sentences", "leave it out"),
    "--lang": ("it belongs to --split-sentences", "leave it out"),
    "--legacy-tokenizer": ("Megatron-LM's older tokenizers are not part of megatron-core", "use --tokenizer-type"),
}

Encoded = tuple[dict[str, tuple[Sequence[int], list[int]]], int]
"""(key -> (token ids, lengths of its parts), bytes of the line)."""


@dataclass(frozen=True)
class PreprocessConfig:
    """What is read and what is written."""

    input: str | None = None
    """File of JSON objects, one a line; may end in .gz."""
    json_keys: tuple[str, ...] = ("text",)
    """Keys of the objects whose text is tokenized; each gets files of its own."""
    output_prefix: str | None = None
    """Beginning of the names of the files."""
    append_eod: bool = False
    """End each document with the tokenizer's end-of-document token."""
    workers: int = 1
    """Processes that tokenize."""
    partitions: int = 1
    """Parts to which documents are dealt out in turn; it changes their order as in Megatron and speeds up nothing."""
    keep_sequential_samples: bool = False
    """Keep the order of the input also with --partitions."""
    log_interval: int = 1000
    """Documents between two lines of progress."""


def parse(words: Sequence[str]) -> Namespace:
    """The namespace of a command line, or ConfigError."""
    parser = Parser(
        prog=PROGRAM,
        usage=f"python {PROGRAM} FLAGS...",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for title, cls in (("input and output", PreprocessConfig), ("tokenizer", TokenizerConfig)):
        docs, group = docs_of(cls), parser.add_argument_group(title)
        for spec in specs_of("tokenizer", cls):
            add_flag(group, spec, docs[spec.dest])
    for word in words:
        name = word.partition("=")[0]
        if name in REFUSED:
            raise ConfigError(refusals.Refusal(*REFUSED[name]).sentence(name))
    args, unknown = parser.parse_known_args(list(words))
    if unknown:
        name = unknown[0].partition("=")[0]
        raise ConfigError(f"there is no flag {name}{nearest_of(name, list(parser._option_string_actions))}")
    check(args)
    return args


def check(args: Namespace) -> None:
    """ConfigError for what is missing or cannot be."""
    for name in ("input", "output_prefix", "tokenizer_type"):
        if getattr(args, name) is None:
            raise ConfigError(f"--{name.replace('_', '-')} is missing; give it (see --help)")
    for name in ("workers", "partitions", "log_interval"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(args, name)}, but must be at least 1")
    if args.keep_sequential_samples:
        args.partitions = 1
    if not Path(args.input).is_file():
        raise ConfigError(f"--input {args.input} does not exist; give a file of JSON objects, one a line")
    folder = Path(args.output_prefix).parent
    if not folder.is_dir():
        raise ConfigError(f"--output-prefix {args.output_prefix} is in {folder}, which does not exist; make it first")


class Encoder:
    """Tokenizes lines; one in each worker."""

    def __init__(self, args: Namespace) -> None:
        from spare_megatron.megatron_adapter.tokenizers import build_tokenizer

        self.keys, self.append_eod = tuple(args.json_keys), args.append_eod
        self.tokenizer = build_tokenizer(args)

    def encode(self, numbered: tuple[int, str]) -> Encoded:
        """The tokens of each key of one line; ConfigError names the line that is no document."""
        number, line = numbered
        try:
            document = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"line {number} of the input is no JSON: {error}; give one object a line") from None
        found: dict[str, tuple[Sequence[int], list[int]]] = {}
        for key in self.keys:
            text = document.get(key) if isinstance(document, dict) else None
            parts = text if isinstance(text, list) else [text]
            if not all(isinstance(part, str) for part in parts):
                raise ConfigError(
                    f"line {number} of the input has no text under {key!r}; name the right key with --json-keys"
                )
            found[key] = self._tokens(parts)
        return found, len(line.encode())

    def _tokens(self, parts: list[str]) -> tuple[Sequence[int], list[int]]:
        tokens: list[int] = []
        lengths: list[int] = []
        for part in parts:
            ids = self.tokenizer.tokenize(part)
            if ids:
                tokens.extend(ids)
                lengths.append(len(ids))
        if tokens and self.append_eod:
            tokens.append(self.tokenizer.eod)
            lengths[-1] += 1
        return tokens, lengths


_encoder: Encoder | None = None


def start_worker(args: Namespace) -> None:
    global _encoder
    _encoder = Encoder(args)


def encode_in_worker(numbered: tuple[int, str]) -> Encoded:
    assert _encoder is not None
    return _encoder.encode(numbered)


@contextlib.contextmanager
def encoded(args: Namespace, lines: Iterator[tuple[int, str]], encoder: Encoder) -> Iterator[Iterator[Encoded]]:
    """The encoded lines in order, by as many processes as --workers says."""
    if args.workers == 1:
        yield map(encoder.encode, lines)
        return
    # spawn: a process that has imported torch must not be forked
    context = multiprocessing.get_context("spawn")
    with context.Pool(args.workers, start_worker, (args,)) as pool:
        yield pool.imap(encode_in_worker, lines, 32)


class Output:
    """The pair of files of one key, collected in parts; it takes its names when it is finished."""

    def __init__(self, prefix: str, vocab_size: int, partitions: int = 1) -> None:
        from spare_megatron.megatron_adapter.datasets import DType, IndexedDatasetBuilder

        self.prefix, self.documents, self.dtype = prefix, 0, DType.optimal_dtype(vocab_size)
        self.parts = [f"{prefix}.part{number}" for number in range(partitions)]
        self.builders = [IndexedDatasetBuilder(f"{part}.bin", dtype=self.dtype) for part in self.parts]

    def add(self, tokens: Sequence[int], lengths: list[int]) -> None:
        self.builders[self.documents % len(self.builders)].add_document(tokens, lengths)  # type: ignore[arg-type]
        self.documents += 1

    def finish(self) -> None:
        for part, builder in zip(self.parts, self.builders, strict=True):
            builder.finalize(f"{part}.idx")
        whole = self.parts[0] if len(self.parts) == 1 else self._merged()
        Path(f"{self.prefix}.idx").unlink(missing_ok=True)
        for end in ("bin", "idx"):
            Path(f"{whole}.{end}").replace(f"{self.prefix}.{end}")
        self.drop()

    def _merged(self) -> str:
        """One pair of the parts' pairs, one behind the other."""
        from spare_megatron.megatron_adapter.datasets import IndexedDatasetBuilder

        whole = f"{self.prefix}.whole"
        self.parts.append(whole)
        merged = IndexedDatasetBuilder(f"{whole}.bin", dtype=self.dtype)
        self.builders.append(merged)
        for part in self.parts[:-1]:
            merged.add_index(part)
        merged.finalize(f"{whole}.idx")
        return whole

    def drop(self) -> None:
        """Remove what is not finished."""
        for builder in self.builders:
            builder.data_file.close()
        for part in self.parts:
            for end in ("bin", "idx"):
                Path(f"{part}.{end}").unlink(missing_ok=True)


def open_text(path: str) -> IO[str]:
    if path.endswith(".gz"):
        return gzip.open(path, "rt", encoding="utf-8")
    return open(path, encoding="utf-8")


def preprocess(args: Namespace, say: Callable[[str], None]) -> dict[str, tuple[int, int]]:
    """Write the files; key -> (documents, tokens)."""
    encoder = Encoder(args)
    outputs = {
        key: Output(f"{args.output_prefix}_{key}_document", int(encoder.tokenizer.vocab_size), args.partitions)
        for key in args.json_keys
    }
    try:
        counts = write_all(args, encoder, outputs, say)
        if not any(tokens for _, tokens in counts.values()):
            raise ConfigError(f"--input {args.input} has no text; give a file of JSON objects, one a line")
        for output in outputs.values():
            output.finish()
    except BaseException:
        for output in outputs.values():
            output.drop()
        raise
    return counts


def write_all(
    args: Namespace, encoder: Encoder, outputs: dict[str, Output], say: Callable[[str], None]
) -> dict[str, tuple[int, int]]:
    """Tokenize every line into the outputs; progress with rates."""
    start, total_bytes = time.monotonic(), 0
    counts = dict.fromkeys(outputs, (0, 0))

    def rates(documents: int) -> str:
        elapsed = max(time.monotonic() - start, 1e-9)
        tokens = sum(tokens for _, tokens in counts.values())
        megabytes = total_bytes / elapsed / 2**20
        return f"({documents / elapsed:.1f} docs/s, {megabytes:.2f} MB/s, {tokens / elapsed:.0f} tokens/s)"

    documents = 0
    with open_text(args.input) as file:
        # an empty line is no document
        lines = ((number, line) for number, line in enumerate(file, 1) if line.strip())
        with encoded(args, lines, encoder) as stream:
            for documents, (found, size) in enumerate(stream, 1):
                total_bytes += size
                for key, (tokens, lengths) in found.items():
                    outputs[key].add(tokens, lengths)
                    counts[key] = (documents, counts[key][1] + len(tokens))
                if documents % args.log_interval == 0:
                    say(f"Processed {documents} documents {rates(documents)}.")
    say(f"Processed {documents} documents {rates(documents)} in {time.monotonic() - start:.1f} s.")
    return counts


def main(words: Sequence[str] | None = None) -> int:
    """The command; its exit code."""

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    try:
        args = parse(sys.argv[1:] if words is None else words)
        counts = preprocess(args, say)
    except ConfigError as error:
        say(f"{PROGRAM}: {error}")
        return 2
    except (UnicodeDecodeError, OSError) as error:
        say(f"{PROGRAM}: {error}")
        return 2
    for key, (documents, tokens) in counts.items():
        print(f"{args.output_prefix}_{key}_document: {documents} documents, {tokens} tokens")
    return 0
