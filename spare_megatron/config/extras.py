"""Packages that only some commands need: each is in an extra of pyproject.toml and is imported where it is used."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from spare_megatron.config.errors import ConfigError


@contextlib.contextmanager
def extra(name: str, needed_by: str) -> Iterator[None]:
    """For the imports of packages of the extra ``name``; ``needed_by`` is the command or flag that needs them.

    Raises:
        ConfigError: a package is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        raise ConfigError(
            f"{needed_by} needs the package {package}, which is not installed; install it with: "
            f"pip install 'spare_megatron[{name}]'"
        ) from None
