"""Removes cached sample indices of data that were made anew under the same prefix.

megatron-core names its cached indices by the prefix and the flags, not by what the files hold, so it would read the
indices of the earlier data: samples that do not exist, or a part of those that do. A cache directory has a record of
the layout (``DataFile.layout``) of each pair whose indices it holds. Where another program wrote them, and there is no
record, indices that are older than the pair's ``.idx`` are removed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from spare_megatron.config.errors import ConfigError
from spare_megatron.data.data_files import DataFile

log = logging.getLogger(__name__)

RECORD = "spare-layouts.json"
DESCRIPTION = "description.txt"
"""End of the name of the text that megatron-core writes beside each set of indices: a JSON object with the prefixes."""


def drop_stale(cache: str | None, files: Sequence[DataFile]) -> None:
    """Remove the cached indices of each pair that is not the one they were made of, and note the pair that is there.

    ``cache`` is --data-cache-path; without it each pair has a cache of its own. ConfigError where old indices cannot be
    removed.
    """
    if cache is not None:
        _drop_in(Path(cache), files)
        return
    for file in files:
        _drop_in(Path(file.prefix) / "cache", [file])


def _drop_in(directory: Path, files: Sequence[DataFile]) -> None:
    known = _record(directory)
    now = {file.prefix: file.layout for file in files}
    if all(known.get(prefix) == layout for prefix, layout in now.items()):
        return
    described = dict(_described(directory))
    for file in files:
        mine = [path for path, text in described.items() if json.dumps(file.prefix) in text]
        if file.prefix in known:
            stale = known[file.prefix] != file.layout
        else:
            stale = any(_older(path, file) for path in mine)
        if stale:
            _remove(directory, file, mine)
    with contextlib.suppress(OSError):  # megatron-core says what cannot be written, if it has to write at all
        directory.mkdir(parents=True, exist_ok=True)
        beside = directory / f".{RECORD}.{os.uname().nodename}.{os.getpid()}"
        beside.write_text(json.dumps(known | now))
        beside.replace(directory / RECORD)


def _record(directory: Path) -> dict[str, int]:
    """Prefix -> layout; empty where there is no record that can be read."""
    try:
        found = json.loads((directory / RECORD).read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _described(directory: Path) -> Iterator[tuple[Path, str]]:
    for path in sorted(directory.rglob(f"*-{DESCRIPTION}")):
        with contextlib.suppress(OSError):
            yield path, path.read_text(errors="replace")


def _older(description: Path, file: DataFile) -> bool:
    try:
        return description.stat().st_mtime_ns < Path(f"{file.prefix}.idx").stat().st_mtime_ns
    except OSError:
        return False


def _remove(directory: Path, file: DataFile, descriptions: Sequence[Path]) -> None:
    """Remove the indices that these texts describe, and the marks of those that are complete."""
    doomed = [*directory.glob("spare-indices-*")]
    for description in descriptions:
        doomed += description.parent.glob(f"{description.name.removesuffix(DESCRIPTION)}*")
    try:
        for path in doomed:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{file.prefix} was made anew, and its old sample indices in {directory} cannot be removed: "
            f"{error.strerror}; remove them, or give another directory with --data-cache-path"
        ) from None
    if descriptions:
        log.warning("%s was made anew: its sample indices in %s are built again", file.prefix, directory)
