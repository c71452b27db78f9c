"""Tokenizes many texts at once, with the ids that ``tokenize`` of megatron-core's tokenizer returns for each.

megatron-core tokenizes one text at a time, and its Hugging Face path spends most of its time on making strings of
tokens and looking each of them up again. Where the underlying library takes many texts and returns ids, it is called
directly (its batch call runs the same code as its single one); where the ids of words can be cached, they are
(:mod:`spare_megatron.megatron_adapter.data.word_memory`). A fast way is used only if it agrees with ``tokenize`` on
``PROBES`` when it is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spare_megatron.megatron_adapter.data.word_memory import Ids, of_hugging_face, of_sentencepiece

EncodeMany = Callable[[list[str]], list[Ids]]

PROBES = (
    *("", " ", "a", "  a  b ", "Hello, world! It's 2026.", "line\nline\r\n\n\tend ", "größe e\u0301 \u00a0x\u3000y"),
    *("東京都 人工知能 한국어 नमस्ते مرحبا", "🙂👩\u200d💻 ﬁne ½", "<s>a</s> <unk><pad> <|endoftext|> [CLS]", "▁a ▁▁ b▁"),
    *("x" * 300, "0123456789 " * 20, "\x00\x01\x7f\u2028\ufeff\ufffd"),
)
"""Texts on which a fast way must agree: spaces of all kinds, scripts, special tokens, characters of no vocabulary."""


def encode_many(tokenizer: Any) -> EncodeMany:
    """The fastest function that tokenizes many texts exactly as this tokenizer of megatron-core."""

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
        return of_sentencepiece(model) or (lambda texts: model.encode(texts, num_threads=1))
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

    def encode(texts: list[str]) -> list[list[int]]:
        return [found.ids for found in backend.encode_batch(texts, add_special_tokens=special)]

    return (None if special else of_hugging_face(backend, encode)) or encode  # type: ignore[return-value]
