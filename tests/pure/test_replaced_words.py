"""Private nouns that plain terms have replaced do not come back, in names, comments, messages, tests or pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
REPLACED = {
    "birth": "process nonce",
    "bye": "close message",
    "calm": "failure-free",
    "courier": "fetch client",
    "farewell": "close message",
    "landing": "receive buffer",
    "life": "job attempt",
    "mute": "silent",
    "office": "leadership lease",
    "parcel": "snapshot shard",
    "shelf": "offered state",
    "speaker": "action dispatcher",
    "tenure": "lease",
    "told": "published, reported, sent",
    "uplink": "reconnecting stream",
    "witness": "check vector, or independent member",
}
"""Word -> what is written instead. A plural, and a part of a name (``Courier``, ``_courier_of``), count as the word."""
PHRASES = {
    "standing assignment": "steady-state assignment",
    "the controller": "the protocol machine, or the coordinator, which runs it",
}
"""What is written instead of several words."""
ORDINARY = (
    r"[Ss]igns? of life|half-life|birth-death|no_sign_of_life",
    r"[`\x22\x27](?:life|calm|told|births?|mute|witnesses|said)[`\x22\x27]",  # keys of journals and files
    r"--life\b|SPARE_LIFE|args\.life|spare-life-|choice-life-|life_began_unix_s|\x22life \d\x22",
    r"--calm-s|calm_s\b|calm_since|calm_pieces|calm_steps(?:_per_s)?|/calm\b|-calm\x22",
    r"timespec \*told|, told\)|told->|\$TOLD|/told\b",
)
"""Patterns of text in which such a word is ordinary English, or a key of a file, a flag or a format that stays."""
FOLDERS = ("spare_megatron", "tests", "benchmarks", "docs", "examples", "scripts", "tools")
HISTORY = {"docs/log.md", "tests/pure/test_replaced_words.py"}
GENERATED = ("_pb2.py", "_pb2.pyi")
SUFFIXES = {".py", ".md", ".proto", ".sh", ".toml", ".txt", ".sbatch"}
PART = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


def pages() -> list[Path]:
    """Every text that people write, except results of benchmarks and what others wrote (tests/data)."""
    inside = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))
    found = [path for path in (*inside, *ROOT.glob("*.md"), *ROOT.glob("*.py")) if path.suffix in SUFFIXES]
    kept = [str(path.relative_to(ROOT)) for path in found if not path.name.endswith(GENERATED)]
    return [ROOT / name for name in sorted(kept) if name not in HISTORY and not name.startswith("tests/data/")]


def words_in(text: str) -> set[str]:
    """The words of ``text`` that are replaced, without what :data:`ORDINARY` allows."""
    for pattern in ORDINARY:
        text = re.sub(pattern, " ", text)
    parts = {part.lower() for part in PART.findall(text)}
    return {word for word in REPLACED if parts & {word, f"{word}s", f"{word}es"}}


def test_no_replaced_word_comes_back() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {word!r}, write {REPLACED[word]!r}"
        for path in pages()
        if words_in(text := path.read_text(errors="replace"))
        for number, line in enumerate(text.splitlines(), 1)
        for word in sorted(words_in(line))
    ]
    assert not found, "\n".join(found)


def test_no_replaced_phrase_comes_back() -> None:
    texts = {path: " ".join(path.read_text(errors="replace").lower().split()) for path in pages()}
    found = [
        f"{path.relative_to(ROOT)}: {phrase!r}, write {better!r}"
        for path, text in texts.items()
        for phrase, better in PHRASES.items()
        if phrase in text
    ]
    assert not found, "\n".join(found)


def test_names_of_files_are_looked_at() -> None:
    found = {str(path.relative_to(ROOT)): words for path in pages() if (words := words_in(path.stem))}
    assert found == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a Courier fetches", {"courier"}),
        ("_courier_of(OfferedState)", {"courier"}),
        ("two couriers, UPLINK", {"courier", "uplink"}),
        ("StateFetchClient, outlanding, bookshelf", set()),
    ],
)
def test_a_word_is_found_in_names_and_as_a_plural(text: str, words: set[str]) -> None:
    assert words_in(text) == words
