"""The data set of ``--fim-data``: GPT samples, some of whose documents are rearranged so that a model learns to fill in
the middle (Bavarian et al., 2022, arXiv 2207.14255).

A document, or a piece of one that a sample has, is decoded, cut at two random characters into prefix, middle and
suffix, and encoded again as ``P prefix S suffix M middle`` (PSM), or as ``P S suffix M prefix middle`` (SPM, variant 2
of the paper); P, S and M are tokens of their own. A sample keeps its length: what is too long is cut off, what is too
short is filled up.

The names and fields are those of Megatron-LM's ``megatron.training.datasets.fim_dataset``. Two things differ. The
random numbers of a sample follow from the seed, the split and the sample's index; there they come from one generator of
each process, so what a sample is depends on which samples the process read before it, and no other rank could compute
it again. And an end of document that follows another one is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from spare_megatron.config.errors import ConfigError
from spare_megatron.megatron_adapter.data.datasets import GPTDataset, GPTDatasetConfig

KINDS = ("prefix", "middle", "suffix", "pad", "eod")


@dataclass
class GPTFIMDatasetConfig(GPTDatasetConfig):  # type: ignore[misc]  # megatron-core has no types
    """A GPTDatasetConfig with the flags of --fim-data, under Megatron-LM's names."""

    fim_rate: float | None = None
    """Share of the documents that are rearranged."""
    fim_spm_rate: float | None = None
    """Share of these that are rearranged as SPM, not as PSM."""
    fim_extra_tokens: Mapping[str, str] | None = None
    """The tokens 'prefix', 'middle', 'suffix', 'pad' and 'eod'."""
    fim_split_sample: str | None = None
    """Token that divides a document into fragments, each of which is rearranged by itself."""
    fim_fragment_rate: float | None = None
    """Share of the fragments of a chosen document that are rearranged."""
    fim_no_prefix: str | None = None
    """What begins with this text is never rearranged."""


@dataclass(frozen=True)
class Rearrangement:
    """How token ids are rearranged; ``encode`` and ``decode`` are the tokenizer's."""

    encode: Callable[[str], Sequence[int]]
    decode: Callable[[list[int]], str]
    tokens: Mapping[str, int]
    """Id of each of :data:`KINDS`."""
    rate: float
    spm_rate: float
    split: int | None = None
    fragment_rate: float = 0.0
    no_prefix: str | None = None

    def sample(self, ids: np.ndarray, draws: np.random.Generator) -> np.ndarray:
        """[length] int64 token ids: those of ``ids``, document by document, with the same length."""
        parts = [self.document(part, draws) for part in _divided(ids, self.tokens["eod"])]
        found = _joined(parts, self.tokens["eod"])[: len(ids)]
        return np.concatenate([found, np.full(len(ids) - len(found), self.tokens["pad"], dtype=np.int64)])

    def document(self, ids: np.ndarray, draws: np.random.Generator) -> np.ndarray:
        """One document, or the piece of one that a sample has, of whatever length it has then."""
        fragments = [ids] if self.split is None else _divided(ids, self.split)
        if len(fragments) == 1:
            return self._rearranged(ids, self.rate, draws)
        if draws.random() >= self.rate:
            return ids
        return _joined([self._rearranged(one, self.fragment_rate, draws) for one in fragments], self.split)

    def _rearranged(self, ids: np.ndarray, rate: float, draws: np.random.Generator) -> np.ndarray:
        if not len(ids) or draws.random() >= rate:
            return ids
        text = self.decode(ids.tolist())
        if self.no_prefix is not None and text.startswith(self.no_prefix):
            return ids
        first, last = sorted(int(cut) for cut in draws.integers(0, len(text) + 1, 2))
        prefix, middle, suffix = (list(self.encode(part)) for part in (text[:first], text[first:last], text[last:]))
        begin, fill, end = (self.tokens[kind] for kind in ("prefix", "middle", "suffix"))
        if draws.random() < self.spm_rate:
            return np.array([begin, end, *suffix, fill, *prefix, *middle], dtype=np.int64)
        return np.array([begin, *prefix, end, *suffix, fill, *middle], dtype=np.int64)


class GPTFIMDataset(GPTDataset):  # type: ignore[misc]  # megatron-core has no types
    """megatron-core's GPTDataset, with rearranged documents. Raises ConfigError where the tokenizer lacks a token."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config, tokenizer = self.config, self.config.tokenizer
        tokens = {kind: token_id(tokenizer, config.fim_extra_tokens[kind], f"--fim-{kind}-token") for kind in KINDS}
        split = config.fim_split_sample
        self._rearrangement = Rearrangement(
            encode=tokenizer.tokenize,
            decode=tokenizer.detokenize,
            tokens=tokens,
            rate=config.fim_rate,
            spm_rate=config.fim_spm_rate,
            split=None if split is None else token_id(tokenizer, split, "--fim-split-sample"),
            fragment_rate=config.fim_fragment_rate or 0.0,
            no_prefix=config.fim_no_prefix,
        )

    def _query_document_sample_shuffle_indices(self, idx: int) -> tuple[Any, ...]:
        text, *others = super()._query_document_sample_shuffle_indices(idx)
        length = len(text)
        while length and text[length - 1] == self._pad_token_id:  # the last sample of the data may be filled up
            length -= 1
        draws = np.random.default_rng([self.config.random_seed, self.index_split.value, int(idx)])
        found = self._rearrangement.sample(np.asarray(text[:length], dtype=np.int64), draws)
        return np.concatenate([found, np.asarray(text[length:], dtype=np.int64)]), *others


def token_id(tokenizer: Any, token: str, flag: str) -> int:
    """The id of a special token; ConfigError where the tokenizer has none of this text."""
    library = getattr(tokenizer, "_tokenizer", tokenizer)
    try:
        (found,) = library.tokens_to_ids([token])
        (text,) = library.ids_to_tokens([found])
    except (AttributeError, KeyError, IndexError, TypeError, ValueError, NotImplementedError):
        found, text = None, None
    if found is None or text != token:
        raise ConfigError(
            f"{flag} is {token!r}, which the tokenizer does not have as one token; give {flag} a token that it has, or "
            "add one to the tokenizer"
        )
    return int(found)


def _divided(ids: np.ndarray, at: int) -> list[np.ndarray]:
    """The parts between the tokens ``at``, which are left out."""
    (places,) = np.nonzero(ids == at)
    starts, stops = [0, *(places + 1)], [*places, len(ids)]
    return [ids[start:stop] for start, stop in zip(starts, stops, strict=True)]


def _joined(parts: Sequence[np.ndarray], between: int | None) -> np.ndarray:
    found: list[np.ndarray] = []
    for part in parts:
        found += [part] if not found else [np.array([between], dtype=np.int64), part]
    return np.concatenate(found).astype(np.int64)
