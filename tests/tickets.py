"""Runs for engines that a test drives by itself."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from spare_megatron.controller.tickets import Taken, Ticket


def run_of(pieces: Iterable[int], audits: Iterable[int] = (), compared: Collection[int] = ()) -> Taken:
    """The tickets of ``audits``, then of ``pieces``, all known."""
    audited = [Ticket(piece, audited=True) for piece in audits]
    return Taken([*audited, *(Ticket(piece, compared=piece in compared) for piece in pieces)])
