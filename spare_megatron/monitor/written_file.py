"""Writes what was drawn of a job to the file that its user named, as a whole or not at all."""

from __future__ import annotations

import contextlib
from pathlib import Path

from spare_megatron.config.errors import ConfigError
from spare_megatron.runtime.disk import words
from spare_megatron.runtime.run_directory import scratch_of


def write_drawn(what: str, path: Path, content: bytes) -> None:
    """Replace ``path`` by ``content``. Raises ConfigError, with ``what`` it is, where it cannot be written."""
    scratch = scratch_of(path)
    try:
        scratch.write_bytes(content)
        scratch.replace(path)
    except OSError as error:
        raise ConfigError(f"the {what} {path} cannot be written: {words(error)}") from None
    finally:
        with contextlib.suppress(OSError):
            scratch.unlink(missing_ok=True)
