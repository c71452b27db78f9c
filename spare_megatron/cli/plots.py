"""Writes the plots of the commands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spare_megatron.config.errors import ConfigError


def write_plot(figure: Any, path: Path) -> None:
    """Write a matplotlib figure in the format of ``path``'s suffix, and close it; ConfigError where that fails."""
    from matplotlib import pyplot

    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {path} cannot be written: {error}") from error
    finally:
        pyplot.close(figure)
