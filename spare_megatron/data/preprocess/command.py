"""spare-preprocess tokenizes the text of each document and writes data files in megatron-core's format.

The command line is that of Megatron-LM's ``tools/preprocess_data.py``. The pair of files of a key appears when it is
complete, ``PREFIX_KEY_document.bin`` first and ``.idx`` last, so an interrupted run leaves no pair that looks whole;
given again, the same command goes on where that run stopped. Documents keep the order of the input, whatever the
number of workers; with ``--partitions P`` they have Megatron's order: they are dealt out to P parts in turn and the
parts follow one another.
"""

from __future__ import annotations

import argparse
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.flags import flag, flag_name
from spare_megatron.config.plural import counted
from spare_megatron.config.sections import TokenizerConfig
from spare_megatron.config.version_flag import add_version
from spare_megatron.data.preprocess.encode import EncodedBlock, WorkerLostError, encoded
from spare_megatron.data.preprocess.text_files import blocks, check_inputs, inputs_of
from spare_megatron.data.preprocess.token_files import EncodingProgress, Output, progress_of
from spare_megatron.flags import refusals
from spare_megatron.flags.parser import Parser, add_flag
from spare_megatron.flags.specs import docs_of, specs_of
from spare_megatron.flags.supported import nearest_of

PROGRAM = "spare-preprocess"
EXAMPLE = """examples:
  spare-preprocess --input corpus.jsonl --output-prefix corpus --append-eod --workers 4 \\
    --tokenizer-type SentencePieceTokenizer --tokenizer-model tokenizer.model
writes corpus_text_document.bin and corpus_text_document.idx; train with
--data-path corpus_text_document

  spare-preprocess --input 'shards/*.jsonl.zst' more.parquet --output-prefix corpus --append-eod \\
    --workers 16 --tokenizer-type HuggingFaceTokenizer \\
    --tokenizer-model DIRECTORY_WITH_tokenizer.json
reads several files of several kinds, one after the other

  ... --tokenizer-type GPT2BPETokenizer --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt
  ... --tokenizer-type TikTokenizer --tokenizer-model vocab.json --vocab-size 131072 \\
    --tiktoken-pattern v2

An interrupted run leaves PREFIX.progress and goes on from there when the same command is given
again."""

REFUSED = {
    "--split-sentences": ("sentences are for BERT, and only decoder-only models are trained here", "leave it out"),
    "--keep-newlines": ("it belongs to --split-sentences", "leave it out"),
    "--lang": ("it belongs to --split-sentences", "leave it out"),
    "--legacy-tokenizer": ("Megatron-LM's older tokenizers are not part of megatron-core", "use --tokenizer-type"),
}

BLOCK_BYTES = 1 << 19
"""Bytes of input that go to a worker at once: enough that sending them costs little beside tokenizing them, few enough
that all workers are busy to the end."""
KEPT_EVERY_S = 2.0
"""Seconds between two writes of the progress file; an interruption loses at most so much work."""


@dataclass(frozen=True)
class PreprocessConfig:
    """What is read and what is written."""

    input: tuple[str, ...] | None = flag(None, nargs="+")
    """Files, directories or quoted patterns, read in this order. A file has a JSON object in each line (.jsonl or any
    other name), is plain text (.txt, one document) or Parquet (.parquet); all but Parquet may end in .gz or .zst."""
    json_keys: tuple[str, ...] = ("text",)
    """Keys of the objects whose text is tokenized; each gets files of its own."""
    output_prefix: str | None = None
    """Beginning of the names of the files that are written."""
    append_eod: bool = False
    """End each document with the tokenizer's end-of-document token."""
    workers: int = 1
    """Number of processes that tokenize."""
    partitions: int = 1
    """Number of parts to which documents are dealt out in turn. It changes their order as in Megatron and speeds up
    nothing."""
    keep_sequential_samples: bool = False
    """Keep the order of the input even with --partitions."""
    log_interval: int = 1000
    """Number of documents between two lines of progress."""


def parse(words: Sequence[str]) -> Namespace:
    """The namespace of a command line, or ConfigError."""
    parser = Parser(
        prog=PROGRAM,
        usage=f"{PROGRAM} FLAGS...",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_version(parser)
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
    """ConfigError for a flag that is missing or has an impossible value."""
    for name in ("input", "output_prefix", "tokenizer_type"):
        if getattr(args, name) is None:
            raise ConfigError(f"{flag_name(name)} is missing; give it (see --help)")
    for name in ("workers", "partitions", "log_interval"):
        if getattr(args, name) < 1:
            raise ConfigError(f"{flag_name(name)} is {getattr(args, name)}, but must be at least 1")
    if args.keep_sequential_samples:
        args.partitions = 1
    check_inputs(args.input)
    folder = Path(args.output_prefix).parent
    if not folder.is_dir():
        raise ConfigError(f"--output-prefix {args.output_prefix} is in {folder}, which does not exist; make it first")


def settings_of(args: Namespace, files: Sequence[Path]) -> dict[str, Any]:
    """All that the bytes of the output depend on, by name: flags, input files, files of the tokenizer.

    Of each file, its size in bytes and its modification time in ns.
    """
    ignored = ("workers", "log_interval", "output_prefix", "input")
    settings = {flag_name(name): value for name, value in vars(args).items() if name not in ignored}
    settings["--input"] = [str(path) for path in files]
    models = [Path(model) for model in (args.tokenizer_model, args.vocab_file, args.merge_file) if model is not None]
    for path in (*files, *models, *(one for model in models if model.is_dir() for one in sorted(model.iterdir()))):
        if path.is_file():
            found = path.stat()
            settings[f"the size and time of {path}"] = [found.st_size, found.st_mtime_ns]
    return {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}


class Run:
    """One run of the tool: its progress, and its output files, which are opened when the dtype of tokens is known."""

    def __init__(self, args: Namespace, announce: Callable[[str], None]) -> None:
        self._args, self._announce = args, announce
        self.files = inputs_of(args.input)
        settings = settings_of(args, self.files)
        self._record = Path(f"{args.output_prefix}.progress")
        found = progress_of(self._record, settings)
        self.progress = found or EncodingProgress(settings, tokens=dict.fromkeys(args.json_keys, 0))
        self.outputs: dict[str, Output] = {}
        if found is not None:
            announce(f"Going on after {counted(found.documents, 'document')} of an interrupted run.")
            self._open(found.dtype)
        self._start_s = self._kept_s = time.monotonic()
        self._bytes, self._before, self._tokens_before = 0, self.progress.documents, sum(self.progress.tokens.values())

    def _open(self, dtype: str) -> None:
        self.progress.dtype = dtype
        for key in self._args.json_keys:
            prefix = f"{self._args.output_prefix}_{key}_document"
            self.outputs[key] = Output(prefix, dtype, self._args.partitions, self.progress.sizes.get(key))
            self.outputs[key].documents = self.progress.documents

    def add(self, block: EncodedBlock) -> None:
        """Write the tokens of a block; print progress and write the progress file when it is time."""
        if not self.outputs:
            self._open(block.dtype)
        progress = self.progress
        for key, found in block.keys.items():
            self.outputs[key].add(found)
            progress.tokens[key] += int(found.lengths.sum())
        reported = progress.documents // self._args.log_interval
        progress.place, progress.documents = block.end, next(iter(self.outputs.values())).documents
        self._bytes += block.bytes_in
        if progress.documents // self._args.log_interval > reported:
            self._announce(f"Processed {progress.documents} documents {self.rates()}.")
        if time.monotonic() - self._kept_s >= KEPT_EVERY_S:
            self.keep()

    def keep(self) -> None:
        """Sync all output files to the disk, then write the progress file that counts their bytes."""
        self.progress.sizes = {key: [part.sizes() for part in one.parts] for key, one in self.outputs.items()}
        self.progress.keep(self._record)
        self._kept_s = time.monotonic()

    def rates(self) -> str:
        """The rates of this run, without what an interrupted run did before."""
        elapsed = max(time.monotonic() - self._start_s, 1e-9)
        documents = self.progress.documents - self._before
        tokens = sum(self.progress.tokens.values()) - self._tokens_before
        megabytes = self._bytes / elapsed / 2**20
        return f"({documents / elapsed:.1f} docs/s, {megabytes:.2f} MB/s, {tokens / elapsed:.0f} tokens/s)"

    def finish(self) -> None:
        """Complete the pairs of files and give them their names; ConfigError when the input has no text."""
        if not any(self.progress.tokens.values()):
            raise ConfigError(f"--input {' '.join(self._args.input)} has no text; give a file of JSON objects")
        elapsed = time.monotonic() - self._start_s
        self._announce(f"Processed {self.progress.documents} documents {self.rates()} in {elapsed:.1f} s.")
        for output in self.outputs.values():
            output.prepare()
        self._record.unlink(missing_ok=True)
        for output in self.outputs.values():
            output.publish()

    def stop(self) -> None:
        """Close the unfinished files, and remove them where no progress file says what is good of them."""
        if self._record.exists():
            for output in self.outputs.values():
                output.close()
        else:
            self.drop()

    def drop(self) -> None:
        """Remove the unfinished files, unless an earlier, interrupted run or another one wrote a part of them."""
        if self._before or not self.outputs:
            for output in self.outputs.values():
                output.close()
            return
        self._record.unlink(missing_ok=True)
        for output in self.outputs.values():
            output.remove()


def preprocess(args: Namespace, announce: Callable[[str], None]) -> EncodingProgress:
    """Write the files and return what was written.

    Raises:
        ConfigError: the user must correct a flag or the input; what this run wrote is removed.
        WorkerLostError: a worker was killed; the progress file stays, and the same command goes on from it.
    """
    run = Run(args, announce)
    try:
        for block in encoded(args, blocks(run.files, args.json_keys, BLOCK_BYTES, run.progress.place)):
            run.add(block)
        run.finish()
    except WorkerLostError:
        if run.outputs:
            run.keep()
        raise
    except (KeyboardInterrupt, OSError):  # the same command goes on from what was kept last
        run.stop()
        raise
    except BaseException:
        run.drop()
        raise
    return run.progress


def main(words: Sequence[str] | None = None) -> int:
    """Run the command. Returns its exit code: 2 for what the user must correct, 1 where the same command may be given
    again."""

    def announce(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    try:
        args = parse(sys.argv[1:] if words is None else words)
        done = preprocess(args, announce)
    except ConfigError as error:
        announce(f"{PROGRAM}: {error}")
        return 2
    except OSError as error:
        announce(
            f"{PROGRAM}: {error.filename or args.output_prefix} cannot be used: {error.strerror or error}; make room "
            "or check its rights, and give the same command again"
        )
        return 2
    except WorkerLostError as error:
        announce(f"{PROGRAM}: {error}; give the same command with fewer --workers, and it goes on where it stopped")
        return 1
    for key, tokens in done.tokens.items():
        print(f"{args.output_prefix}_{key}_document: {counted(done.documents, 'document')}, {counted(tokens, 'token')}")
    return 0
