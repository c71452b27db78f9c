"""Refuses words of a command line that are no text: messages between processes carry them as UTF-8."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

from spare_megatron.config.errors import ConfigError


def check_words(words: Iterable[str]) -> None:
    """ConfigError for a word, or a current directory, whose bytes this process could not take for text."""
    try:
        here = [os.getcwd()]
    except OSError:  # it is gone
        here = []
    for word in (*words, *here):
        try:
            word.encode()
        except UnicodeEncodeError:
            encoding = sys.getfilesystemencoding()
            fix = "set LC_ALL=C.UTF-8, or give another name"
            fix = "give another name" if encoding == "utf-8" else fix
            raise ConfigError(f"{ascii(os.fsencode(word))[1:]} is no text in {encoding}; {fix}") from None
