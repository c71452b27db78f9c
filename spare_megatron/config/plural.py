"""Writes numbers of things in messages, so that a noun agrees with its number. Imports nothing."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str = "") -> str:
    """'1 piece', '4 pieces'; ``plural`` where it is not the noun and an s."""
    return f"{number} {noun}" if number == 1 else f"{number} {plural or noun + 's'}"
