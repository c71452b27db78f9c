"""Amounts of bytes in the words of a command line: '500MB', '4Gb' (bits), '1.5GiB/s'."""

from __future__ import annotations

import re

from spare_megatron.config.errors import ConfigError

_FACTORS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_FACTORS |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_FORM = re.compile(r"(\d+(?:\.\d+)?)\s*([kMGT]|[KMGT]i)?([Bb])(?:/s)?")


def rate_of(name: str, text: str) -> float:
    """Bytes a second from text such as '500MB' or '4Gb'. ConfigError, which names the flag ``name``, where it is no
    such text, or no rate above 0."""
    found = _FORM.fullmatch(text.strip())
    rate = 0.0
    if found:
        rate = float(found[1]) * _FACTORS[found[2] or ""] / (8 if found[3] == "b" else 1)
    if not rate >= 1:
        raise ConfigError(
            f"{name} is {text!r}, but takes bytes (B) or bits (b) a second, at least 1B, as in {name} 500MB "
            f"or {name} 4Gb"
        )
    return rate


def in_bytes(amount: float) -> str:
    """An amount with three digits and its unit: '1.25 GB', '80 MB'."""
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 999.5:
            return f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{amount:.3g} TB" if amount < 999.5 else f"{amount:.0f} TB"
