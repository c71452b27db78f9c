"""Computes a recorded choice again from the figures of its record."""

from __future__ import annotations

from collections.abc import Mapping

from spare_megatron.config.errors import ConfigError
from spare_megatron.planning.at_start import Choice, Measured, at_start, updated_interval, without_progress
from spare_megatron.protocol.messages import Tuned


def decided_again(event: Tuned, start: Tuned | None) -> Mapping[str, object]:
    """The choice computed again from the figures of a record, which must equal the record's. ``start`` is the record of
    the choice at the start of the job attempt; None where ``event`` is that record itself."""
    if start is None:
        measured = Measured(**event.figures)  # type: ignore[arg-type]
        try:
            return at_start(measured).as_json()
        except ConfigError as error:
            return without_progress(measured, str(error)).as_json()
    measured, first = Measured(**start.figures), Choice(**start.choice)  # type: ignore[arg-type]
    found = updated_interval(measured, first, **event.figures)  # type: ignore[arg-type]
    return {} if found is None else found.as_json()
