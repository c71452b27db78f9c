"""Tokenizes blocks of JSON lines in as many processes as --workers says.

Processes exchange bytes and arrays: a block of the input as it was read, and its tokens as they are written.
Workers are forked from one process that has imported megatron-core and does nothing else, so the import is paid once
and no process with threads is ever forked. A worker ends itself when its parent has ended for any reason.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
import threading
from argparse import Namespace
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

import numpy as np
import numpy.typing as npt

from spare_megatron.config.errors import ConfigError
from spare_megatron.data.preprocess.text_files import Block, ReadPosition
from spare_megatron.megatron_adapter.data.tokenizers import imports_of

BLOCKS_AHEAD = 4
"""Blocks in flight for each worker, so that others still have work while one takes long."""
Counts = npt.NDArray[np.int32]
Tokens = npt.NDArray[Any]
"""(tokens,), in the integer dtype that the tokenizer returns."""


@dataclass(frozen=True)
class Encoded:
    """The documents of one block under one key, ready to be written."""

    tokens: bytes
    """Token ids one after the other, in the dtype of the data file."""
    lengths: Counts
    """(sequences,): number of tokens of each sequence. A document has one sequence, or one for each text of a list;
    texts without tokens have none."""
    parts: Counts
    """(documents,): number of sequences of each document."""


@dataclass(frozen=True)
class EncodedBlock:
    """One block, tokenized."""

    bytes_in: int
    """Bytes of the input, for the rate."""
    end: ReadPosition
    dtype: str
    """dtype of the tokens: uint16 or int32, by the size of the vocabulary."""
    keys: dict[str, Encoded]


class WorkerLostError(Exception):
    """A process that tokenizes was killed, so it reported no error."""


class Encoder:
    """Tokenizes documents; each worker has one. Its constructor imports megatron-core."""

    def __init__(self, args: Namespace) -> None:
        from spare_megatron.megatron_adapter.data.batch_tokenizers import encode_many
        from spare_megatron.megatron_adapter.data.datasets import DType
        from spare_megatron.megatron_adapter.data.tokenizers import build_tokenizer, needed_eod

        # the workers already run in parallel, so the tokenizer library needs no threads
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self.keys = tuple(args.json_keys)
        tokenizer = build_tokenizer(args)
        self.end = np.array([needed_eod(tokenizer, args, "--append-eod")]) if args.append_eod else None
        self.encode_many = encode_many(tokenizer)
        self.dtype = np.dtype(DType.optimal_dtype(int(tokenizer.vocab_size)))

    def encode(self, block: Block) -> EncodedBlock:
        """The tokens of each key's texts; ConfigError names a line that is not a document."""
        lines = ((at, line) for at, line in enumerate(block.data.splitlines()) if line.strip())
        documents = [(at, self._document(block.where(at), line)) for at, line in lines]
        keys = {key: self._encoded(block, [(at, texts[key]) for at, texts in documents]) for key in self.keys}
        return EncodedBlock(len(block.data), block.end, self.dtype.name, keys)

    def _document(self, where: str, line: bytes) -> dict[str, list[str]]:
        try:
            document = json.loads(line.decode())
        except UnicodeDecodeError as error:
            raise ConfigError(f"{where} is not UTF-8: {error.reason} at byte {error.start}; convert the file") from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where} is not JSON: {error}; give one object per line") from None
        found: dict[str, list[Any]] = {}
        for key in self.keys:
            text = document.get(key) if isinstance(document, dict) else None
            found[key] = text if isinstance(text, list) else [text]
            if not all(isinstance(part, str) for part in found[key]):
                raise ConfigError(f"{where} has no text under {key!r}; name the right key with --json-keys")
        return found

    def _encoded(self, block: Block, documents: list[tuple[int, list[str]]]) -> Encoded:
        try:
            encoded = iter(self.encode_many([part for _, texts in documents for part in texts]))
        except Exception:
            encoded = self._one_by_one(block, documents)
        tokens: list[Tokens] = []
        lengths: list[int] = []
        parts: list[int] = []
        for _, texts in documents:
            before = len(lengths)
            for ids in itertools.islice(encoded, len(texts)):
                if len(ids):
                    tokens.append(np.asarray(ids))
                    lengths.append(len(ids))
            if len(lengths) > before and self.end is not None:
                tokens.append(self.end)
                lengths[-1] += 1
            parts.append(len(lengths) - before)
        return Encoded(self._bytes(block, tokens), np.array(lengths, np.int32), np.array(parts, np.int32))

    def _bytes(self, block: Block, tokens: list[Tokens]) -> bytes:
        if not tokens:
            return b""
        together, fits = np.concatenate(tokens), np.iinfo(self.dtype)
        least, greatest = int(together.min()), int(together.max())
        if least < 0 or greatest > fits.max:
            wrong = least if least < 0 else greatest
            raise ConfigError(
                f"a document from {block.where(0)} on has token id {wrong}, which {self.dtype} cannot hold; "
                + ("use a tokenizer without it" if wrong < 0 else "give a --vocab-size above the largest token id")
            )
        return together.astype(self.dtype).tobytes()

    def _one_by_one(self, block: Block, documents: list[tuple[int, list[str]]]) -> Iterator[Any]:
        """Tokenize the texts again one by one; ConfigError names the line of the one that fails."""
        for at, texts in documents:
            for text in texts:
                try:
                    yield self.encode_many([text])[0]
                except Exception as error:
                    raise ConfigError(
                        f"{block.where(at)} cannot be tokenized: {error}; correct the text or use another tokenizer"
                    ) from None


_encoder: Encoder | None = None


def end_with_parent() -> None:
    """Initialize a worker: it ignores Ctrl-C, which the process that started it handles, and a thread ends it when that
    process has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch(sentinel: int = parent.sentinel) -> None:
        wait([sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def encode_in_worker(args: Namespace, block: Block) -> EncodedBlock:
    """Tokenize ``block`` in a worker. The first call makes the worker's encoder, so that an error of the tokenizer is
    returned like any other."""
    global _encoder
    if _encoder is None:
        _encoder = Encoder(args)
    return _encoder.encode(block)


def encoded(args: Namespace, blocks: Iterator[Block]) -> Iterator[EncodedBlock]:
    """The blocks in order, tokenized by as many processes as --workers says (1: by this process).

    At most BLOCKS_AHEAD blocks for each worker are held at a time. WorkerLostError when a worker is killed.
    """
    if args.workers == 1:
        encoder = Encoder(args)
        yield from map(encoder.encode, blocks)
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [*imports_of(args), __name__, "spare_megatron.megatron_adapter.data.tokenizer_imports"]
    )
    pool = ProcessPoolExecutor(args.workers, context, end_with_parent)
    flying: deque[Future[EncodedBlock]] = deque()
    try:
        for block in blocks:
            flying.append(pool.submit(encode_in_worker, args, block))
            while len(flying) >= BLOCKS_AHEAD * args.workers or (flying and flying[0].done()):
                yield flying.popleft().result()
        while flying:
            yield flying.popleft().result()
    except BrokenProcessPool:
        raise WorkerLostError("a process that tokenizes was killed, which happens where memory runs out") from None
    finally:
        pool.shutdown(cancel_futures=True)
