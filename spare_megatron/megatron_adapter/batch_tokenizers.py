"""Many texts at once through megatron-core's tokenizers, with the ids that ``tokenize`` gives for each of them.

megatron-core tokenizes one text at a time, and most of its Hugging Face path is spent on making strings of tokens and
looking each of them up again. Where the library underneath takes many texts and hands out ids, it is asked directly.

Exactness. The library's own batch call is the same code as its single one. For SentencePiece models of byte pairs,
words are remembered: no merge can cross a boundary between a character and the space behind it when no piece has a
space behind another character, so each stretch of spaces and word has the pieces that it has alone (a model that has
such a piece, or that sums scores along the text as unigram models do, is not treated so). Whatever the way, it is used
only where it agrees with ``tokenize`` on ``PROBES`` when it is made.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

Ids = Sequence[int]
EncodeMany = Callable[[list[str]], list[Ids]]

PROBES = (
    *("", " ", "a", "  a  b ", "Hello, world! It's 2026.", "line\nline\r\n\n\tend ", "größe e\u0301 \u00a0x\u3000y"),
    *("東京都 人工知能 한국어 नमस्ते مرحبا", "🙂👩\u200d💻 ﬁne ½", "<s>a</s> <unk><pad> <|endoftext|> [CLS]", "▁a ▁▁ b▁"),
    *("x" * 300, "0123456789 " * 20, "\x00\x01\x7f\u2028\ufeff\ufffd"),
)
"""Texts on which a fast way must agree: spaces of all kinds, scripts, special tokens, what no vocabulary has."""
REMEMBERED_MAX = 4_000_000
"""Characters of the words remembered, some 200 MB with their ids at the most; then all are forgotten, for a text's
frequent words are soon known again."""
SPACE = "▁"
STRETCHES = re.compile(f"{SPACE}*[^{SPACE}]+|{SPACE}+")
BPE = 2
"""``TrainerSpec.ModelType`` of SentencePiece's model file."""


def encode_many(tokenizer: Any) -> EncodeMany:
    """The fastest way that is known to be exact for this tokenizer of megatron-core."""

    def one_by_one(texts: list[str]) -> list[Ids]:
        return [tokenizer.tokenize(text) for text in texts]

    fast = _fast(getattr(tokenizer, "_tokenizer", None))
    return fast if fast is not None and _agree(fast, one_by_one) else one_by_one


def _agree(fast: EncodeMany, slow: EncodeMany) -> bool:
    for probe in PROBES:
        try:
            wanted = slow([probe])
        except ValueError:  # no text for this tokenizer
            continue
        if [list(ids) for ids in fast([probe])] != [list(ids) for ids in wanted]:
            return False
    return True


def _fast(library: Any) -> EncodeMany | None:
    name = type(library).__name__
    if name in ("HuggingFaceTokenizer", "MegatronHFTokenizer"):
        return _hugging_face(library)
    if name == "SentencePieceTokenizer" and not library.legacy and library.ignore_extra_whitespaces:
        model = library.tokenizer
        return Words(model) if _words_are_alone(model) else lambda texts: model.encode(texts, num_threads=1)
    if name == "TikTokenTokenizer":
        model = library.tokenizer
        return lambda texts: [model.encode_to_numpy(text, allowed_special="all") for text in texts]
    return None


def _hugging_face(library: Any) -> EncodeMany | None:
    backend = getattr(library.tokenizer, "backend_tokenizer", None)
    if backend is None or not hasattr(backend, "encode_batch"):
        return None
    special = bool(library.include_special_tokens)
    backend.no_truncation()
    backend.no_padding()
    return lambda texts: [found.ids for found in backend.encode_batch(texts, add_special_tokens=special)]


def _words_are_alone(model: Any) -> bool:
    """Whether it merges byte pairs and no piece has a space behind another character."""
    try:
        from sentencepiece import sentencepiece_model_pb2
    except (ImportError, TypeError):
        return False
    description = sentencepiece_model_pb2.ModelProto.FromString(model.serialized_model_proto())
    crossing = re.compile(f"[^{SPACE} ][{SPACE} ]")
    return description.trainer_spec.model_type == BPE and not any(
        crossing.search(piece.piece) for piece in description.pieces
    )


class Words:
    """A SentencePiece model that remembers the ids of each word with the spaces before it."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._known: dict[str, list[int] | None] = {}
        self._characters = 0

    def __call__(self, texts: list[str]) -> list[Ids]:
        if self._characters > REMEMBERED_MAX:
            self._known.clear()
            self._characters = 0
        stretches = [STRETCHES.findall(normal) for normal in self._model.normalize(texts)]
        known = self._known
        self._learn(list({word for words in stretches for word in words if word not in known}))
        found: list[Ids] = []
        for text, words in zip(texts, stretches, strict=True):
            ids: list[int] = []
            for word in words:
                more = known[word]
                if more is None:
                    ids = self._model.encode(text)
                    break
                ids += more
            found.append(ids)
        return found

    def _learn(self, words: list[str]) -> None:
        """Ids of words that are given as the model sees them; None where no text of its own gives the same."""
        self._characters += sum(map(len, words))
        raw = [word.replace(SPACE, " ") for word in words]
        as_they_are = self._model.normalize(raw)
        # most models put a space before a text
        shorter = [text[1:] if text.startswith(" ") else text for text in raw]
        without_space = self._model.normalize(shorter)
        texts = []
        for word, long, long_normal, short, short_normal in zip(
            words, raw, as_they_are, shorter, without_space, strict=True
        ):
            texts.append(short if short_normal == word else long if long_normal == word else None)
        ids = iter(self._model.encode([text for text in texts if text is not None], num_threads=1))
        for word, text in zip(words, texts, strict=True):
            self._known[word] = None if text is None else next(ids)
        lone = self._model.piece_to_id(SPACE)
        if SPACE in words and lone != self._model.unk_id():
            self._known[SPACE] = [lone]  # a space at the end; alone, the text would be empty
