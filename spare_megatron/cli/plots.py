"""Draws and writes the plots of the commands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.extras import extra


def load_pyplot() -> Any:
    """matplotlib.pyplot without a display; ConfigError where it is not installed."""
    with extra("plots", "--plot"):
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    return pyplot


def write_plot(figure: Any, path: Path) -> None:
    """Write a matplotlib figure in the format of ``path``'s suffix, and close it; ConfigError where that fails."""
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {path} cannot be written: {error}") from error
    finally:
        load_pyplot().close(figure)
