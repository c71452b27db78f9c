"""From JSON lines to data files: tokenizes the text of each document and writes it in megatron-core's format.

The command line is that of Megatron-LM's ``tools/preprocess_data.py``. The pair of files of a key appears when it is
complete, ``PREFIX_KEY_document.bin`` first and ``.idx`` last, so an interrupted run leaves no pair that looks whole.
The order of the documents is that of the input, whatever the number of workers; with ``--partitions P`` it is
Megatron's: documents are dealt out to P parts in turn and the parts follow one another.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import sys
import time
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.flags import flag
from spare_megatron.config.sections import TokenizerConfig
from spare_megatron.training.flags import refusals
from spare_megatron.training.flags.parser import Parser, add_flag, nearest_of
from spare_megatron.training.flags.specs import docs_of, specs_of
from spare_megatron.training.text_files import check_inputs, documents, inputs_of

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

BATCH_DOCUMENTS, BATCH_CHARACTERS = 512, 1 << 20
"""What goes to a worker at once, whichever is reached first: small enough to keep all workers busy, large enough that
sending it costs little beside tokenizing it."""
BATCHES_AHEAD = 4
"""Batches in flight for each worker."""

Numbered = tuple[str, str]
"""(where a document comes from, for messages; its text: a line of JSON, or the words of a text file)."""


@dataclass(frozen=True)
class Encoded:
    """The documents of one batch under one key, ready to be written."""

    tokens: bytes
    """Token ids one behind the other, in the width of the data file."""
    lengths: list[int]
    """Of each part of each document."""
    parts: list[int]
    """Number of parts of each document."""


@dataclass(frozen=True)
class PreprocessConfig:
    """What is read and what is written."""

    input: tuple[str, ...] | None = flag(None, nargs="+")
    """Files, directories or quoted patterns, read in this order: JSON objects, one a line (.jsonl or any other name),
    plain text (.txt, a file is a document) or Parquet (.parquet); all but Parquet also with .gz or .zst."""
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
    check_inputs(args.input)
    folder = Path(args.output_prefix).parent
    if not folder.is_dir():
        raise ConfigError(f"--output-prefix {args.output_prefix} is in {folder}, which does not exist; make it first")


class Encoder:
    """Tokenizes documents; one in each worker."""

    def __init__(self, args: Namespace) -> None:
        from spare_megatron.megatron_adapter.datasets import DType
        from spare_megatron.megatron_adapter.tokenizers import build_tokenizer

        self.keys, self.append_eod = tuple(args.json_keys), args.append_eod
        self.tokenizer = build_tokenizer(args)
        self.dtype = DType.optimal_dtype(int(self.tokenizer.vocab_size))

    def encode(self, batch: Sequence[Numbered]) -> dict[str, Encoded]:
        """The tokens under each key; ConfigError names the line that is no document."""
        texts = [self._texts(where, line) for where, line in batch]
        return {key: self._encoded([one[key] for one in texts]) for key in self.keys}

    def _texts(self, where: str, line: str) -> dict[str, list[str]]:
        try:
            document = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{where} is no JSON: {error}; give one object a line") from None
        found: dict[str, list[str]] = {}
        for key in self.keys:
            text = document.get(key) if isinstance(document, dict) else None
            found[key] = text if isinstance(text, list) else [text]
            if not all(isinstance(part, str) for part in found[key]):
                raise ConfigError(f"{where} has no text under {key!r}; name the right key with --json-keys")
        return found

    def _encoded(self, texts: list[list[str]]) -> Encoded:
        tokens: list[int] = []
        lengths: list[int] = []
        parts: list[int] = []
        tokenize = self.tokenizer.tokenize
        for text in texts:
            before = len(lengths)
            for part in text:
                ids = tokenize(part)
                if ids:
                    tokens.extend(ids)
                    lengths.append(len(ids))
            if len(lengths) > before and self.append_eod:
                tokens.append(self.tokenizer.eod)
                lengths[-1] += 1
            parts.append(len(lengths) - before)
        return Encoded(np.array(tokens, dtype=self.dtype).tobytes(), lengths, parts)


_encoder: Encoder | None = None


def start_worker(args: Namespace) -> None:
    global _encoder
    _encoder = Encoder(args)


def encode_in_worker(batch: Sequence[Numbered]) -> dict[str, Encoded]:
    assert _encoder is not None
    return _encoder.encode(batch)


def batches(stream: Iterator[Numbered], most: int) -> Iterator[list[Numbered]]:
    """Documents in order, at most ``most`` at a time."""
    batch: list[Numbered] = []
    characters = 0
    for one in stream:
        batch.append(one)
        characters += len(one[1])
        if len(batch) == most or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


Job = tuple[int, dict[str, Encoded]]
"""(characters that went in, what came out) of a batch."""


def encoded(args: Namespace, stream: Iterator[list[Numbered]], encoder: Encoder) -> Iterator[Job]:
    """The batches in order, encoded by as many processes as --workers says; few are held at a time."""
    if args.workers == 1:
        for batch in stream:
            yield sum(len(text) for _, text in batch), encoder.encode(batch)
        return
    # spawn: a process that has imported torch must not be forked
    context = multiprocessing.get_context("spawn")
    with context.Pool(args.workers, start_worker, (args,)) as pool:
        flying: deque[tuple[int, Any]] = deque()
        for batch in itertools.chain(stream, [None]):
            if batch is not None:
                size = sum(len(text) for _, text in batch)
                flying.append((size, pool.apply_async(encode_in_worker, (batch,))))
            while flying and (batch is None or len(flying) >= BATCHES_AHEAD * args.workers):
                size, result = flying.popleft()
                yield size, result.get()


class Output:
    """The pair of files of one key, collected in parts; it takes its names when it is finished."""

    def __init__(self, prefix: str, vocab_size: int, partitions: int = 1) -> None:
        from spare_megatron.megatron_adapter.datasets import DType, IndexedDatasetBuilder

        self.prefix, self.documents, self.dtype = prefix, 0, DType.optimal_dtype(vocab_size)
        self.parts = [f"{prefix}.part{number}" for number in range(partitions)]
        self.builders = [IndexedDatasetBuilder(f"{part}.bin", dtype=self.dtype) for part in self.parts]

    def add(self, batch: Encoded) -> None:
        """As the builder's ``add_document`` does it, for many at once; with partitions one by one."""
        if len(self.builders) == 1:
            self._write(0, batch.tokens, batch.lengths, batch.parts)
            return
        at, sequence, width = 0, 0, self.dtype().itemsize
        for parts in batch.parts:
            lengths = batch.lengths[sequence : sequence + parts]
            size = sum(lengths) * width
            self._write(self.documents % len(self.builders), batch.tokens[at : at + size], lengths, [parts])
            at, sequence = at + size, sequence + parts

    def _write(self, builder: int, tokens: bytes, lengths: list[int], parts: list[int]) -> None:
        one = self.builders[builder]
        one.data_file.write(tokens)
        first = len(one.sequence_lengths)
        one.sequence_lengths.extend(lengths)
        one.document_indices.extend(first + count for count in itertools.accumulate(parts))
        self.documents += len(parts)

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
            raise ConfigError(f"--input {' '.join(args.input)} has no text; give a file of JSON objects, one a line")
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

    done, said = 0, 0
    most = min(BATCH_DOCUMENTS, args.log_interval)
    stream = batches(documents(inputs_of(args.input), args.json_keys), most)
    for characters, found in encoded(args, stream, encoder):
        total_bytes += characters
        done += len(next(iter(found.values())).parts)
        for key, batch in found.items():
            outputs[key].add(batch)
            counts[key] = (done, counts[key][1] + sum(batch.lengths))
        if done // args.log_interval > said:
            said = done // args.log_interval
            say(f"Processed {done} documents {rates(done)}.")
    say(f"Processed {done} documents {rates(done)} in {time.monotonic() - start:.1f} s.")
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
    for key, (done, tokens) in counts.items():
        print(f"{args.output_prefix}_{key}_document: {done} documents, {tokens} tokens")
    return 0
