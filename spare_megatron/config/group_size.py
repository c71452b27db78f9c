"""How many ranks a group has, read from the flags before any rank parses them; the launcher must know it first.

Only the degrees of parallelism are looked at; the ranks read and check the flags as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from spare_megatron.config.errors import ConfigError


def flag_value(words: Sequence[str], flag: str) -> str | None:
    """The last value of ``--flag VALUE`` or ``--flag=VALUE``, None where it is not given."""
    value = None
    for index, word in enumerate(words):
        if word == flag and index + 1 < len(words):
            value = words[index + 1]
        elif word.startswith(flag + "="):
            value = word[len(flag) + 1 :]
    return value


def group_size_of(words: Sequence[str]) -> int:
    """M = TP x PP x CP x D; D as said, or the least for which EP x expert-TP fits into TP x CP x D.

    Raises:
        ConfigError: a degree is no number of 1 or more.
    """
    tensor = _degree(words, "--tensor-model-parallel-size", 1)
    pipeline = _degree(words, "--pipeline-model-parallel-size", 1)
    context = _degree(words, "--context-parallel-size", 1)
    expert = _degree(words, "--expert-model-parallel-size", 1)
    expert *= _degree(words, "--expert-tensor-parallel-size", tensor)
    least = expert // math.gcd(expert, tensor * context)
    inner = flag_value(words, "--spare-inner-data-parallel")
    data = least if inner in (None, "auto") else _degree(words, "--spare-inner-data-parallel", least)
    return tensor * pipeline * context * data


def _degree(words: Sequence[str], flag: str, default: int) -> int:
    text = flag_value(words, flag)
    if text is None:
        return default
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"{flag} {text} is no number of 1 or more; use for example {flag} {default}")
    return int(text)
