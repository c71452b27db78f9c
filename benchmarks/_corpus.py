"""Makes text for the preprocess tool, JSON lines of invented words, with the same bytes on every machine.

No file and no network is read, so checksums of its token ids can be kept in the repository. Draws use only
``random.Random.random``, whose values no Python version may change.

Words follow Zipf's law over an invented vocabulary, so a tokenizer trained on one part knows the words of the next;
punctuation, numbers, line breaks, runs of spaces, scripts without spaces, combining marks, emoji and words never seen
again are mixed in. Some documents are empty, only spaces, a list of parts, or long (300,000 characters). Every document
also has a text of numbers under ``numbers``, for the tokenizer that only reads numbers.
"""

from __future__ import annotations

import bisect
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path

SYLLABLES = (
    *("ka", "lo", "mi", "ter", "an", "ver", "str", "ing", "po", "qua", "ze", "nu", "sha", "ri", "ou", "th", "ent"),
    *("ble", "ish", "cor", "da", "fe", "gli", "hy"),
)
FOREIGN = [
    "größe",
    "naïve",
    "привет",
    "мир",
    "γνώση",
    "مرحبا",
    "नमस्ते",
    "東京都",
    "人工知能",
    "한국어",
    "e\u0301te\u0301",
    "ﬁne",
    "🙂",
    "👩‍💻",
]
ENDS = [". ", ", ", "; ", "! ", "?\n", ".\n\n", "  ", "\t", " - ", "\u00a0", "\r\n", " (x) ", "...", "'s "]
VOCABULARY, LONG_CHARACTERS = 20_000, 300_000


class _Writer:
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random
        self._words = [self._word() for _ in range(VOCABULARY)]
        self._weights = list(itertools.accumulate(1 / (rank + 1) for rank in range(VOCABULARY)))

    def below(self, limit: int) -> int:
        return int(self._random() * limit)

    def _word(self) -> str:
        return "".join(SYLLABLES[self.below(len(SYLLABLES))] for _ in range(1 + self.below(4)))

    def _token(self) -> str:
        kind = self._random()
        if kind < 0.93:
            word = self._words[bisect.bisect(self._weights, self._random() * self._weights[-1])]
            return word.capitalize() if kind < 0.08 else word
        if kind < 0.96:
            return str(self.below(10_000))
        if kind < 0.98:
            return FOREIGN[self.below(len(FOREIGN))]
        return "".join(chr(97 + self.below(26)) for _ in range(4 + self.below(12)))

    def text(self, characters: int) -> str:
        parts: list[str] = []
        while characters > 0:
            parts.append(self._token())
            parts.append(" " if self._random() < 0.87 else ENDS[self.below(len(ENDS))])
            characters -= len(parts[-2]) + len(parts[-1])
        return "".join(parts)

    def document(self, number: int) -> object:
        if number % 1000 == 500:
            return self.text(LONG_CHARACTERS)
        if number % 97 == 3:
            return ["", " ", "\n", []][number // 97 % 4]
        if number % 101 == 5:
            return [self.text(200), "", self.text(50)]
        return self.text(50 + int(8000 * self._random() ** 2))

    def numbers(self) -> str:
        return " ".join(str(self.below(100_000)) for _ in range(1 + self.below(30)))


def lines(seed: int) -> Iterator[str]:
    """An endless sequence of documents, one JSON object per line; every third line has no escaped characters."""
    writer = _Writer(seed)
    for number in itertools.count():
        document = {"text": writer.document(number), "numbers": writer.numbers()}
        yield json.dumps(document, ensure_ascii=number % 3 != 0) + "\n"


def write_corpus(path: Path, megabytes: float, seed: int = 0) -> None:
    """Write at least so many MB (10^6 bytes) of documents, in UTF-8."""
    left = int(megabytes * 1e6)
    with path.open("wb") as file:
        for line in lines(seed):
            left -= file.write(line.encode())
            if left <= 0:
                return


def tokenizer_flags(folder: Path, vocabulary: int) -> dict[str, list[str]]:
    """Kind of tokenizer -> its flags, for the tokenizers that ``_tokenizers.train`` has written into ``folder``."""
    return {
        "sentencepiece": ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", f"{folder}/bpe.model"],
        "gpt2": [
            *("--tokenizer-type", "GPT2BPETokenizer"),
            *("--vocab-file", f"{folder}/gpt2/vocab.json", "--merge-file", f"{folder}/gpt2/merges.txt"),
        ],
        "huggingface": ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", f"{folder}/huggingface"],
        "tiktoken": [
            *("--tokenizer-type", "TikTokenizer", "--tokenizer-model", f"{folder}/tiktoken.json"),
            *("--vocab-size", str(vocabulary), "--tiktoken-num-special-tokens", "16", "--tiktoken-pattern", "v2"),
        ],
        "null": ["--tokenizer-type", "NullTokenizer", "--vocab-size", "100000", "--json-keys", "numbers"],
    }
