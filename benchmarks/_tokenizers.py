"""Trains tokenizers of four kinds on ``_corpus``, for the preprocess benchmark and for tests/data/preprocess.

Needs sentencepiece and tokenizers. Another version of these packages may train other tokenizers from the same text, so
those that must not change are kept as files and not trained again.
"""

from __future__ import annotations

import base64
import io
import itertools
import json
from pathlib import Path

import sentencepiece
from _corpus import lines, tokenizer_flags
from tokenizers import AddedToken, ByteLevelBPETokenizer, Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
"""The expression with which Llama 3's published tokenizer splits text."""
TEXTS = 1500
END = "<|endoftext|>"


def train(folder: Path, vocabulary: int) -> dict[str, list[str]]:
    """Train all kinds and write them into ``folder``; returns kind -> its flags for preprocess_data.py."""
    texts = [json.loads(line)["text"] for line in itertools.islice(lines(seed=1), TEXTS)]
    texts = [text for text in texts if isinstance(text, str)]
    for maker in (_sentencepiece, _gpt2, _hugging_face, _tiktoken):
        maker(folder, texts, vocabulary)
    return tokenizer_flags(folder, vocabulary)


def _sentencepiece(folder: Path, texts: list[str], vocabulary: int) -> None:
    """Train a tokenizer like Llama 2's: byte pairs, bytes for unknown characters, no normalization of text."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in texts for line in text[:20_000].split("\n")]),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocabulary,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        num_threads=1,
        minloglevel=2,
    )
    (folder / "bpe.model").write_bytes(model.getvalue())


def _gpt2(folder: Path, texts: list[str], vocabulary: int) -> None:
    """Train vocab.json and merges.txt, in a folder that transformers loads as the model named gpt2."""
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(texts, vocabulary, special_tokens=[END], show_progress=False)
    (folder / "gpt2").mkdir()
    trained.save_model(str(folder / "gpt2"))
    config = {"tokenizer_class": "GPT2Tokenizer", "bos_token": END, "eos_token": END, "unk_token": END}
    (folder / "gpt2" / "tokenizer_config.json").write_text(json.dumps(config) + "\n")


def _hugging_face(folder: Path, texts: list[str], vocabulary: int) -> None:
    """Train a tokenizer like Llama 3's: byte pairs after its own splitting pattern, special tokens around a text."""
    trained = Tokenizer(BPE(ignore_merges=True))
    split = Split(Regex(LLAMA3_SPLIT), behavior="isolated")
    trained.pre_tokenizer = Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])
    trained.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(vocab_size=vocabulary - 2, initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    trained.train_from_iterator(texts, trainer)
    begin, end = "<|begin_of_text|>", "<|end_of_text|>"
    trained.add_special_tokens([AddedToken(begin, special=True), AddedToken(end, special=True)])
    ids = [(token, trained.token_to_id(token)) for token in (begin, end)]
    trained.post_processor = TemplateProcessing(single=f"{begin} $A", pair=f"{begin} $A $B", special_tokens=ids)
    (folder / "huggingface").mkdir()
    trained.save(str(folder / "huggingface" / "tokenizer.json"), pretty=False)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": begin, "eos_token": end}
    (folder / "huggingface" / "tokenizer_config.json").write_text(json.dumps(config) + "\n")


def _tiktoken(folder: Path, texts: list[str], vocabulary: int) -> None:
    """Train a tokenizer in megatron-core's JSON format: the 256 bytes, then the pieces in the order of their merges."""
    trained = Tokenizer(BPE())
    trained.pre_tokenizer = Sequence(
        [Split(Regex(LLAMA3_SPLIT), behavior="isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    trainer = BpeTrainer(vocab_size=vocabulary - 16, initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    trained.train_from_iterator(texts, trainer)
    pieces = [bytes([value]) for value in range(256)]
    for piece, _ in sorted(trained.get_vocab().items(), key=lambda item: item[1])[256:]:
        pieces.append(_bytes_of(piece))
    entries = [
        {"rank": rank, "token_bytes": base64.b64encode(piece).decode(), "token_str": piece.decode(errors="replace")}
        for rank, piece in enumerate(pieces)
    ]
    (folder / "tiktoken.json").write_text("[\n" + ",\n".join(map(json.dumps, entries)) + "\n]\n")


def _bytes_of(piece: str) -> bytes:
    """The bytes that the characters of a byte-level piece stand for, by GPT-2's table."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(value): value for value in printable}
    rest = [value for value in range(256) if value not in printable]
    table.update({chr(256 + at): value for at, value in enumerate(rest)})
    return bytes(table[character] for character in piece)
