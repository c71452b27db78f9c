"""Keeps two jobs from saving into one directory.

Both would write the same checkpoints: each would remove what the other one is writing, mix its files with its own, and
start again from the other one's weights. So the launcher of a job (under torchrun its coordinator) holds a lock in its
``--save`` directory. Where there are no locks, or the directory cannot be written now, the job runs without.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from spare_megatron.config.errors import ConfigError
from spare_megatron.runtime.disk import words
from spare_megatron.runtime.run_directory import RunDirectory, holder_of, sign

LOCK = ".spare-lock"


@contextlib.contextmanager
def only_job(save: str, run_dir: RunDirectory, reported: Callable[[str], None]) -> Iterator[None]:
    """Inside, this is the only job that saves into the directory ``save``; empty: it does not save. ConfigError where
    another one, which has another run directory, does; ``reported`` is called with a sentence where the directory
    cannot be written."""
    directory = Path(save)
    was_there = directory.is_dir()
    lock = _lock(directory, f"the job of {run_dir.path.absolute()}", reported) if save else None
    try:
        yield
    finally:
        if lock is not None:
            _release(lock, directory, was_there)


def _lock(save: Path, owner: str, reported: Callable[[str], None]) -> TextIO | None:
    try:
        save.mkdir(parents=True, exist_ok=True)
        file = (save / LOCK).open("a+")
    except OSError as error:
        reported(f"WARNING: no checkpoint can be saved now, as --save {save} cannot be written: {words(error)}")
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _is_there(file, save):  # its holder has just removed it
            file.close()
            return _lock(save, owner, reported)
        sign(file, owner)
    except BlockingIOError:
        holder = holder_of(file) or "another job"
        file.close()
        if holder.startswith(f"{owner} ("):  # a launcher of this job that died without its host's locks
            return None
        raise ConfigError(
            f"--save {save} is in use by {holder}, and two jobs would overwrite each other's checkpoints; end that job "
            f"or give another directory (if that job is gone, remove {save / LOCK})"
        ) from None
    except OSError:
        pass
    return file


def _is_there(file: TextIO, save: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), (save / LOCK).stat())
    except FileNotFoundError:
        return False


def _release(file: TextIO, save: Path, was_there: bool) -> None:
    """Release the lock, and leave neither its file behind nor a directory that was made for it. Where the directory was
    moved away meanwhile, another job may have its own lock in its place."""
    with contextlib.suppress(OSError):
        if _is_there(file, save):
            (save / LOCK).unlink()
            if not was_there:
                save.rmdir()
    file.close()
