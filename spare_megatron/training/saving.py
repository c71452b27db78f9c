"""How one group writes a checkpoint that counts for the whole job: write, list, ask, publish.

Collective in the group: every rank of it calls :meth:`GroupSaver.save` for the same step. Position 0 makes the
directory, asks the coordinator and publishes; the others learn the outcome from it.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from spare_megatron.checkpoint.folder import partial_directory, publish, write_manifest
from spare_megatron.config.place import Place

log = logging.getLogger(__name__)


@dataclass
class GroupSaver:
    """Writes checkpoints of one rank's group into ``directory``, Megatron's ``--save``."""

    directory: Path
    place: Place
    interval: int | None
    """Steps between checkpoints; None: only where the run ends."""
    last_step: int
    """Last step that trains: a round after it (the closing evaluation) is saved under its number."""
    write: Callable[[int, Path], None]
    """``write(step, directory)``: all ranks of the group write their part; returns when all have."""
    agree: Callable[[bool], bool]
    """What position 0 gives, on every rank of the group; collective."""

    _published: int = -1

    def due(self, step: int) -> bool:
        """True when ``step`` is one at which the job saves."""
        return self.interval is not None and step % self.interval == 0 and step <= self.last_step

    def save(self, step: int, epoch: int, accept: Callable[[int, str], bool]) -> bool:
        """Write and publish ``step``; False when the coordinator does not accept it or the disk does not take it."""
        trained = min(step, self.last_step)
        if trained == self._published:
            return True
        partial = partial_directory(self.directory, trained, self.place.group, self.place.incarnation, epoch)
        if not self.agree(not self.place.is_leader or self._prepare(partial)):
            return False
        self.write(trained, partial)
        published = self.agree(not self.place.is_leader or self._publish(step, trained, partial, accept))
        if published:
            self._published = trained
        return published

    def _prepare(self, partial: Path) -> bool:
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        except OSError as error:
            log.warning("cannot make %s: %s; training goes on without this checkpoint", partial, error.strerror)
            return False
        return True

    def _publish(self, step: int, trained: int, partial: Path, accept: Callable[[int, str], bool]) -> bool:
        try:
            write_manifest(partial)
            if not accept(step, str(partial)):
                return False
            publish(partial, self.directory, trained)
        except OSError as error:
            log.warning("cannot publish %s: %s; training goes on without this checkpoint", partial, error.strerror)
            return False
        return True
