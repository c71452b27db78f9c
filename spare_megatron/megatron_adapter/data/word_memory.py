"""Cuts texts into stretches whose ids are the same alone as in the text, and caches the ids of each stretch.

Texts repeat the same words, and looking up a stretch is many times faster than tokenizing it. This is exact only where
no token crosses a cut, and where the ids before a cut do not depend on the text after it. That is known for two kinds
of tokenizers; texts for others are not cut.

**SentencePiece models of byte pairs** in which no piece has a space behind another character: no merge can cross a
cut between a character and the space behind it.

**Hugging Face byte pairs** behind GPT-2's split or one of ``PUBLISHED_SPLITS``, which match from left to right. In each
a match that ends with an ASCII letter goes on with letters only, one that ends with an ASCII digit with digits only,
and none goes on with a space behind a letter, a number or a visible ASCII character; only white space looks ahead, and
no further than the character behind it. So there is a cut behind ASCII letters before any other ASCII character,
behind ASCII digits likewise, and before such a space. NFC composes no ASCII character with what stands before it. A
text that has an added token in it is not cut.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Ids = Sequence[int] | npt.NDArray[np.int32]
Cut = Callable[[list[str]], list[list[str] | None]]
"""Returns the stretches of each text; None for a text that must not be cut."""
Learn = Callable[[list[str]], Sequence[Sequence[int] | None]]
"""Returns the ids of each stretch; None for a stretch whose ids cannot be found by tokenizing it alone."""

REMEMBERED_MAX = 4_000_000
"""Number of characters of cached stretches (with their ids at most some 200 MB) above which the cache is emptied:
frequent words are soon in it again."""


class WordMemory:
    """Composes the ids of texts from the cached ids of their stretches."""

    def __init__(self, cut: Cut, learn: Learn, whole: Callable[[str], Sequence[int]]) -> None:
        """``whole`` tokenizes a text that is not cut, or that has a stretch whose ids ``learn`` cannot find."""
        self._cut, self._learn, self._whole = cut, learn, whole
        self._known: dict[str, bytes] = {}
        self._unknowable: set[str] = set()
        self._characters = 0

    def __call__(self, texts: list[str]) -> list[Ids]:
        if self._characters > REMEMBERED_MAX:
            self._known.clear()
            self._unknowable.clear()
            self._characters = 0
        stretches = self._cut(texts)
        new = list(set().union(*filter(None, stretches)).difference(self._known, self._unknowable))
        for word, ids in zip(new, self._learn(new), strict=True):
            if ids is None:
                self._unknowable.add(word)
            else:
                self._known[word] = array("i", ids).tobytes()
        self._characters += sum(map(len, new))
        return [self._ids(text, words) for text, words in zip(texts, stretches, strict=True)]

    def _ids(self, text: str, words: list[str] | None) -> Ids:
        if words is None or not self._unknowable.isdisjoint(words):
            return self._whole(text)
        return np.frombuffer(b"".join(map(self._known.__getitem__, words)), np.int32)


# ----------------------------------------------------------------------------------------------------- SentencePiece

SPACE = "▁"
_WORDS = re.compile(f"{SPACE}*[^{SPACE}]+|{SPACE}+")
_CROSSING = re.compile(f"[^{SPACE} ][{SPACE} ]")
_BPE = 2
"""``TrainerSpec.ModelType`` of SentencePiece's model file."""


def of_sentencepiece(model: Any) -> WordMemory | None:
    """The cache for a SentencePieceProcessor; None where a stretch may have other ids alone than in its text."""
    try:
        from sentencepiece import sentencepiece_model_pb2
    except (ImportError, TypeError):
        return None
    description = sentencepiece_model_pb2.ModelProto.FromString(model.serialized_model_proto())
    if description.trainer_spec.model_type != _BPE:
        return None
    if any(_CROSSING.search(piece.piece) for piece in description.pieces):
        return None

    def cut(texts: list[str]) -> list[list[str] | None]:
        return [_WORDS.findall(normal) for normal in model.normalize(texts)]

    return WordMemory(cut, lambda words: _learn_sentencepiece(model, words), model.encode)


def _learn_sentencepiece(model: Any, words: list[str]) -> list[list[int] | None]:
    """The ids of words that are given in the model's normalized form; None for a word that no text normalizes to."""
    raw = [word.replace(SPACE, " ") for word in words]
    # most models put a space before a text
    shorter = [text[1:] if text.startswith(" ") else text for text in raw]
    texts: list[str | None] = []
    for word, long, long_normal, short, short_normal in zip(
        words, raw, model.normalize(raw), shorter, model.normalize(shorter), strict=True
    ):
        texts.append(short if short_normal == word else long if long_normal == word else None)
    ids = iter(model.encode([text for text in texts if text is not None], num_threads=1))
    found: list[list[int] | None] = [None if text is None else next(ids) for text in texts]
    lone = model.piece_to_id(SPACE)
    if SPACE in words and lone != model.unk_id():
        found[words.index(SPACE)] = [lone]  # a space at the end; alone, the text would be empty
    return found


# ------------------------------------------------------------------------------------------------------ Hugging Face

_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_HEAD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
PUBLISHED_SPLITS = (_HEAD + r"\p{N}{1,3}" + _TAIL, _HEAD + r"\p{N}" + _TAIL)
"""The splitting patterns of Llama 3 and Qwen2; GPT-2's is built into the library."""
_BETWEEN = r"(?:[^A-Za-z0-9 ]+|(?<![\w!-~]) )*"
_STRETCHES = re.compile(
    r" ?[A-Za-z]+(?=[\x00-@\[-`{-\x7f])"
    rf"| ?{_BETWEEN}(?:(?:[A-Za-z]+|[0-9]+)[^\x00-\x7f]{_BETWEEN})*(?:[A-Za-z]+|[0-9]+)?"
)
"""The first line is a fast path for the common case, which the second line covers too."""


def of_hugging_face(backend: Any, encode: Callable[[list[str]], list[list[int]]]) -> WordMemory | None:
    """The cache for a tokenizers.Tokenizer; ``encode`` returns its ids without special tokens. None where a stretch may
    have other ids alone than in its text."""
    model, added = backend.model, backend.get_added_tokens_decoder().values()
    # an added token that is matched after NFC may not be in the text before NFC
    as_it_is = backend.normalizer is None or not any(token.normalized for token in added)
    if type(model).__name__ != "BPE" or model.dropout or type(backend.normalizer).__name__ not in ("NoneType", "NFC"):
        return None
    if not as_it_is or not _splits_as_published(backend.pre_tokenizer):
        return None
    search = re.compile("|".join(re.escape(token.content) for token in added) or "(?!)").search

    def cut(texts: list[str]) -> list[list[str] | None]:
        return [None if search(text) else _STRETCHES.findall(text) for text in texts]

    return WordMemory(cut, encode, lambda text: encode([text])[0])


def _splits_as_published(pre_tokenizer: Any) -> bool:
    if pre_tokenizer is None:
        return False
    described = json.loads(pre_tokenizer.__getstate__())
    parts = described["pretokenizers"] if described["type"] == "Sequence" else [described]
    last = parts[-1]
    if last["type"] != "ByteLevel" or last["add_prefix_space"]:
        return False
    if len(parts) == 1:
        return bool(last["use_regex"])
    split = parts[0]
    published = split["type"] == "Split" and split["pattern"].get("Regex") in PUBLISHED_SPLITS
    whole = published and split["behavior"] == "Isolated" and not split["invert"]
    return len(parts) == 2 and whole and not last["use_regex"]
