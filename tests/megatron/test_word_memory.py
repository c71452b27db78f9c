"""Remembered words give the ids of whole texts: random texts of what has ever crossed a cut, against ``tokenize``."""

from __future__ import annotations

import functools
import itertools
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from benchmarks._corpus import lines
from spare_megatron.data.preprocess import command
from spare_megatron.megatron_adapter.data import tokenizers
from spare_megatron.megatron_adapter.data.batch_tokenizers import PROBES, EncodeMany, encode_many
from spare_megatron.megatron_adapter.data.word_memory import PUBLISHED_SPLITS, WordMemory, of_hugging_face

TEXTS = 3000
WHITE = [*[" ", "\n"] * 3, "  ", "\n\n", "\r\n", "\r", "\t", "\u00a0", "\u2003", "\u3000", "\x85", "\x1c"]
VISIBLE = (
    "a b The word end S T é e\u0301 ñ \u0301 ſ \u212a Ω 東 नमस्ते 한 \u1112\u1161 \U0001e900"
    " 1 23 4567 ½ ² ٣ 's 'LL ' 't n't . , ... ( \" _ - </ > {} <| |> <|end|> 🙂 👩\u200d💻 — … « \u200b \x00 \ufeff"
)
ALPHABET = WHITE + VISIBLE.split(" ")
"""What texts are made of: white space of all kinds, letters and marks that join, numbers, what splits treat apart."""


def check(many: EncodeMany, one: Callable[[str], Sequence[int]], alphabet: list[str]) -> None:
    """The same ids, text by text."""
    draw = random.Random(3)
    texts = ["".join(draw.choices(alphabet, k=draw.randrange(12))) for _ in range(TEXTS)] + list(PROBES)
    expected = [list(one(text)) for text in texts]
    for _ in range(2):  # the second time all words are known
        for text, ids, whole_ids in zip(texts, many(texts), expected, strict=True):
            assert list(ids) == whole_ids, repr(text)


def some_texts() -> list[str]:
    """For training."""
    texts = [json.loads(line)["text"] for line in itertools.islice(lines(seed=2), 60)]
    return [text for text in texts if isinstance(text, str)]


def train_sentencepiece(path: Path, kind: str, **options: object) -> Path:
    with path.open("wb") as model:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(some_texts()),
            model_writer=model,
            model_type=kind,
            vocab_size=600,
            minloglevel=2,
            **options,
        )
    return path


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("bpe", {}, True),  # spaces are collapsed, letters normalized
        ("bpe", {"add_dummy_prefix": False, "remove_extra_whitespaces": False, "byte_fallback": True}, True),
        ("bpe", {"split_by_whitespace": False}, False),
        ("bpe", {"treat_whitespace_as_suffix": True}, False),
        ("bpe", {"user_defined_symbols": ["a b", "<x>"]}, False),
        ("bpe", {"user_defined_symbols": ["<x>", "  "]}, True),
        ("unigram", {}, False),
    ],
)
def test_sentencepiece_ids_are_those_of_the_whole_text(
    tmp_path: Path, kind: str, options: dict[str, object], words: bool
) -> None:
    model = train_sentencepiece(tmp_path / "model", kind, **options)
    flags = ["--input", str(model), "--output-prefix", str(tmp_path / "out")]
    flags += ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(model)]
    tokenizer = tokenizers.build_tokenizer(command.parse(flags))
    many = encode_many(tokenizer)
    assert isinstance(many, WordMemory) == words
    alphabet = [" ", " ", "  ", "▁", "a", "b", "a b", "<x>", "ver", "ISH", "\n", "\t", "é", "e\u0301", "ﬁ", "🙂", "東"]
    check(many, tokenizer.tokenize, alphabet)


BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
LLAMA3, QWEN2 = (
    pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), BYTE_LEVEL])
    for pattern in PUBLISHED_SPLITS
)
END = AddedToken("<|end|>", special=True, normalized=False)


@functools.cache
def trained(split: object, normalizer: object) -> str:
    """Byte pairs, trained so that merges reach over everything that the split leaves together."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.normalizer = split, normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=1500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    draw = random.Random(4)
    made.train_from_iterator([*some_texts(), *("".join(draw.choices(ALPHABET, k=40)) for _ in range(2000))], trainer)
    return str(made.to_str())


def hugging_face(
    split: object, normalizer: object = None, added: tuple[AddedToken, ...] = (END,), **model: object
) -> Tokenizer:
    """A tokenizer of such pairs."""
    made = Tokenizer.from_str(trained(split, normalizer))
    for name, value in model.items():
        setattr(made.model, name, value)
    made.add_special_tokens([token for token in added if token.special])
    made.add_tokens([token for token in added if not token.special])
    return made


def whole(backend: Tokenizer) -> EncodeMany:
    """The ids of each text as the library has them."""
    return lambda texts: [found.ids for found in backend.encode_batch(texts, add_special_tokens=False)]


@pytest.mark.parametrize("split", [GPT2, LLAMA3, QWEN2], ids=["gpt2", "llama3", "qwen2"])
@pytest.mark.parametrize("normalizer", [None, normalizers.NFC()], ids=["as it is", "nfc"])
@pytest.mark.parametrize("ignore_merges", [False, True])
def test_hugging_face_ids_are_those_of_the_whole_text(split: object, normalizer: object, ignore_merges: bool) -> None:
    backend = hugging_face(split, normalizer, ignore_merges=ignore_merges)
    memory = of_hugging_face(backend, whole(backend))
    assert memory is not None
    check(memory, lambda text: backend.encode(text, add_special_tokens=False).ids, ALPHABET)


def test_an_added_token_may_reach_over_anything() -> None:
    odd = [AddedToken("a b", lstrip=True), AddedToken("word", single_word=True), AddedToken(" the", rstrip=True)]
    backend = hugging_face(GPT2, None, (END, *odd))
    memory = of_hugging_face(backend, whole(backend))
    assert memory is not None
    alphabet = [" ", "a", "b", "a b", "word", "s", " the", "\n", ".", "  "]
    check(memory, lambda text: backend.encode(text, add_special_tokens=False).ids, alphabet)


@pytest.mark.parametrize(
    ("split", "normalizer", "model"),
    [
        (pre_tokenizers.ByteLevel(add_prefix_space=True), None, {}),
        (BYTE_LEVEL, None, {}),
        (pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\s"), "isolated"), BYTE_LEVEL]), None, {}),
        (pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(PUBLISHED_SPLITS[0]), "removed"), BYTE_LEVEL]), None, {}),
        (pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(PUBLISHED_SPLITS[0]), "isolated"), GPT2]), None, {}),
        (pre_tokenizers.Whitespace(), None, {}),
        (GPT2, normalizers.Prepend("x"), {}),
        (GPT2, None, {"dropout": 0.1}),
    ],
    ids=["prefix", "no split", "another split", "removed", "split twice", "white space", "prepended", "dropout"],
)
def test_what_is_not_known_to_be_exact_is_not_cut(split: object, normalizer: object, model: dict[str, float]) -> None:
    backend = hugging_face(split, normalizer, **model)
    assert of_hugging_face(backend, whole(backend)) is None


def test_tokens_that_are_sought_after_nfc_may_be_nowhere_before() -> None:
    backend = hugging_face(GPT2, normalizers.NFC(), (AddedToken("KB", normalized=True),))
    assert of_hugging_face(backend, whole(backend)) is None
