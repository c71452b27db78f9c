"""Writes a checkpoint of one group, which counts for the whole job once the coordinator has accepted it.

The training thread of every rank *takes* its share (a copy in memory, collective in the group). A second thread writes
the share and sends position 0 a message, whose thread completes the checkpoint, lists its files in the manifest, asks
the coordinator whether it counts, and gives it its final name. Training waits only for the copy; with ``asynchronous``
False also for the files, and at the end of a run for everything. (The coordinator accepts the checkpoint of step t with
the commit of t + 1, so no step may wait for that.)

Nothing that a disk does ends training: the user is warned once of saves that fail, what they leave behind is removed
when the next one succeeds, and the next interval tries again. One save is in flight at a time. After the last save of a
run there is no next interval: it is tried again for a minute, then this group ends with an error, so that the next one
saves, and a job of which no group could save does not count as finished.

If the disk accepts nothing for :attr:`GroupSaver.hung_s`, the training thread, which waits for the last save, reports
no more progress. The failure detector then removes this group, and the next group saves.

Once the coordinator has been asked, only it knows whether the checkpoint counts. Its answer may not reach the writer,
if the writer is fenced or the job ends first. So the writer never removes such a checkpoint.

May assume: every rank of the group calls :meth:`GroupSaver.save` for the same steps. Promises: a directory with
Megatron's name for a checkpoint is complete and was accepted by the coordinator.
"""

from __future__ import annotations

import logging
import math
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from spare_megatron.checkpoint.files import Create, Files, entry_of
from spare_megatron.checkpoint.folder import (
    Retention,
    discard_partials,
    identities,
    partial_directory,
    publish,
    retire,
    write_manifest,
)
from spare_megatron.config.place import Place
from spare_megatron.runtime.disk import with_retries
from spare_megatron.worker.save_mail import SaveMail, Written

log = logging.getLogger(__name__)

PATIENCE_S = 10.0
"""How long a save that is due waits for the one before it; after that it is left out."""
LAST_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
"""The pauses between the attempts to save at the end of a run."""
PUBLISH_PATIENCE_S = 60.0
"""How long to try, while the disk fails, to give a checkpoint that counts its final name."""
TICK_S = 0.5
UNANSWERED = "this group leaves before it has received whether it counts"
_REASON_CHARS = 250


class LastSaveError(RuntimeError):
    """The state at the end of a run could not be saved."""


class CheckpointShare(Protocol):
    """One rank's part of a checkpoint, which does not change while training goes on."""

    def write(self, create: Create) -> bytes:
        """Write this rank's files; returns what :meth:`finish` needs to know of them."""

    def finish(self, create: Create, reports: Sequence[bytes]) -> None:
        """For position 0: complete the checkpoint, given what each rank's ``write`` returned."""


@dataclass(frozen=True)
class Ask:
    """What a save needs from the training loop."""

    accept: Callable[[int, str], bool]
    """``accept(step, directory)`` waits until the coordinator reports that the checkpoint counts; False where this
    group has to leave before it has received that. From any thread."""
    tick: Callable[[], None]
    """Counts a sign of life; called while the training thread waits."""
    step_s: float = 0.0
    """The time of the step before, of which the stall is given as a part."""


@dataclass
class _Flight:
    """A save whose files are being written."""

    number: int
    step: int
    """The step about which the coordinator is asked: one above the last training step after the closing evaluation."""
    trained: int
    """The step whose number the checkpoint has."""
    partial: Path
    share: CheckpointShare
    ask: Ask
    stall_s: float
    """Time that training waited until the share was taken."""
    started_s: float
    waits: bool
    """Whether training waits for the files too."""
    final: bool = False
    """Whether it is the last one of the run."""
    asked: threading.Event = field(default_factory=threading.Event)
    """Set when this rank's files are written, on position 0 when it asks whether the checkpoint counts; or at the
    end."""
    asked_s: float = 0.0
    failure: str = ""
    done: threading.Event = field(default_factory=threading.Event)
    moved_s: float | None = None
    """When the disk last took something of this rank; None while its writing thread waits for others."""

    def moves(self) -> None:
        """The disk has taken something, or is about to be given something."""
        self.moved_s = time.monotonic()

    def waits_for_others(self) -> None:
        """From now on this rank waits for others: its own disk is not judged meanwhile."""
        self.moved_s = None

    def hangs(self, hung_s: float) -> bool:
        """Whether the disk has taken nothing for so long."""
        moved_s = self.moved_s
        return moved_s is not None and time.monotonic() - moved_s > hung_s


@dataclass
class GroupSaver:
    """Writes checkpoints of one rank's group into ``directory``, Megatron's ``--save``."""

    directory: Path
    place: Place
    last_step: int
    """The last step that trains; the state after the closing evaluation is saved under its number."""
    take: Callable[[int, Path, bool], CheckpointShare]
    """``take(step, directory, copied)`` returns this rank's share, as a copy if training goes on meanwhile.
    Collective."""
    agree: Callable[[bool], bool]
    """Returns the value of position 0 on every rank of the group. Collective."""
    mail: SaveMail
    asynchronous: bool = True
    retention: Retention = field(default_factory=Retention)
    notice: Callable[[str], None] = lambda text: None
    """Shows one line to the user."""
    complete: Callable[[Path], None] = lambda directory: None
    """Called by position 0 to add further files to a checkpoint that is otherwise complete."""
    published: Callable[[int], None] = lambda step: None
    """Called by position 0 once the checkpoint of ``step`` has its final name."""
    hung_s: float = math.inf
    """After how many seconds a disk that takes nothing counts as hung."""

    _flight: _Flight | None = field(default=None, init=False)
    _number: int = field(default=0, init=False)
    _failures: int = field(default=0, init=False)
    _why: str = field(default="see the log of position 0", init=False)
    _found: dict[int, object] = field(default_factory=dict, init=False)
    """The checkpoints that earlier jobs, or earlier job attempts, had published when this rank started."""

    def __post_init__(self) -> None:
        if self.place.is_leader:
            self._found = identities(self.directory)

    def save(self, step: int, epoch: int, ask: Ask, *, since: int, final: bool = False) -> None:
        """Take a checkpoint of ``step`` and write it, while training goes on; if ``final``, or not ``asynchronous``, it
        is written before this returns.

        ``since`` is the last step at which a save was due. It is below ``step`` if this group takes over the saving
        from one that died. Then nothing is saved if that group had published the checkpoint that was due.

        Raises:
            LastSaveError: it is ``final``, and its files could not be written although that was tried several times.
        """
        for pause_s in LAST_PAUSES_S if final else ():
            if not self._try(step, epoch, ask, since, final):
                return
            self._rest(pause_s, ask.tick)
        if self._try(step, epoch, ask, since, final):
            raise LastSaveError(f"the state after step {min(step, self.last_step)} could not be saved: {self._why}")

    def _rest(self, pause_s: float, tick: Callable[[], None]) -> None:
        for _ in range(math.ceil(pause_s / TICK_S)):
            time.sleep(min(TICK_S, pause_s))
            tick()

    def _try(self, step: int, epoch: int, ask: Ask, since: int, final: bool) -> bool:
        """One attempt of :meth:`save`; whether it was the ``final`` one and its files could not be written."""
        started_s = time.monotonic()
        trained = min(step, self.last_step)
        waits = final or not self.asynchronous
        free = self._settle(ask.tick, None if final else PATIENCE_S)
        partial = partial_directory(self.directory, trained, self.place.group, self.place.incarnation, epoch)
        wanted = trained if final else min(since, self.last_step)
        failures = self._failures
        if not self.agree(not self.place.is_leader or self._begins(trained, partial, free, wanted, final)):
            return final and self.agree(self._failures > failures)
        self._settle(ask.tick, None)
        self._number += 1
        share = self.take(trained, partial, not waits)
        now_s = time.monotonic()
        flight = self._flight = _Flight(
            self._number,
            step,
            trained,
            partial,
            share,
            ask,
            stall_s=now_s - started_s,
            started_s=now_s,
            waits=waits,
            final=final,
        )
        threading.Thread(target=self._fly, args=(flight,), name="checkpoint", daemon=True).start()
        if final:
            self._settle(ask.tick, None)
            return self.agree(self._failures > failures and not flight.asked_s)
        if waits:
            self._wait(flight, flight.asked, ask.tick, None)
        return False

    def settle(self, tick: Callable[[], None]) -> None:
        """Wait until nothing is in flight."""
        self._settle(tick, None)

    def _settle(self, tick: Callable[[], None], patience_s: float | None) -> bool:
        return self._flight is None or self._wait(self._flight, self._flight.done, tick, patience_s)

    def _wait(
        self, flight: _Flight, event: threading.Event, tick: Callable[[], None], patience_s: float | None
    ) -> bool:
        """Wait for ``event`` and call ``tick`` now and then, as long as the disk moves; False when the event has not
        come within ``patience_s``."""
        waited_s = 0.0
        while not event.wait(TICK_S if waited_s else 0.0):
            if patience_s is not None and waited_s >= patience_s:
                return False
            if not flight.hangs(self.hung_s):
                tick()
            waited_s += TICK_S
        return True

    # ------------------------------------------------------------------------------------------------ position 0

    def _begins(self, trained: int, partial: Path, free: bool, wanted: int, final: bool) -> bool:
        """Whether a checkpoint is wanted and its directory could be made."""
        before = self._flight
        if not free and before is not None:
            why = f"that of step {before.trained} is still being written; use a longer --save-interval"
            self._failed(trained, why, final)
            return False
        try:
            if self._newest() >= wanted:
                return False
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        except OSError as error:
            self._failed(trained, f"{partial} cannot be made: {error.strerror}", final)
            return False
        return True

    def _newest(self) -> int:
        """The newest step that this job attempt has published, -1 before the first."""
        there = identities(self.directory)
        return max((step for step, identity in there.items() if self._found.get(step) != identity), default=-1)

    # -------------------------------------------------------------------------------------------- writing thread

    def _fly(self, flight: _Flight) -> None:
        try:
            self.mail.written(flight.number, self._write(flight))
            if not self.place.is_leader:
                flight.asked.set()
            if self.place.is_leader:
                flight.failure = self._conclude(flight, self.mail.collect(flight.number))
                self.mail.end(flight.number, flight.failure)
            else:
                flight.failure = self.mail.ended(flight.number)
        except Exception as error:  # the store is gone with position 0, so this rank ends too
            flight.failure = f"the group's store is gone: {error}"
            log.warning("the checkpoint of step %d is given up: %s", flight.trained, flight.failure)
        finally:
            flight.asked.set()
            flight.done.set()

    def _write(self, flight: _Flight) -> Written:
        files = Files(flight.partial, flight.moves)
        flight.moves()
        try:
            report = flight.share.write(files.create)
        except Exception as error:  # torch wraps the disk's errors in its own
            log.warning("rank %d cannot write %s: %s", self.place.position, flight.partial, _reason(error))
            return Written(failure=f"rank {self.place.position} cannot write: {_reason(error)}")
        finally:
            flight.waits_for_others()
        return Written(files=files.entries, report=report)

    def _conclude(self, flight: _Flight, reported: list[Written]) -> str:
        """Why the checkpoint is not published; empty when it is."""
        try:
            failure = next((one.failure for one in reported if one.failure), "") or self._publish(flight, reported)
        except Exception as error:
            failure = _reason(error)
        if failure == UNANSWERED:
            log.warning("the checkpoint of step %d stays in %s: %s", flight.trained, flight.partial, failure)
            return failure
        if failure:
            if not flight.asked.is_set():  # else it may count, and the launcher then publishes it
                shutil.rmtree(flight.partial, ignore_errors=True)
            self._failed(flight.trained, failure, flight.final and not flight.asked_s)
            return failure
        self._succeeded(flight, sum(entry["bytes"] for one in reported for entry in one.files.values()))
        return ""

    def _publish(self, flight: _Flight, reported: list[Written]) -> str:
        files = Files(flight.partial, flight.moves)
        flight.moves()
        flight.share.finish(files.create, [one.report for one in reported])
        for one in reported:
            files.entries.update(one.files)
        self.complete(flight.partial)
        for path in sorted(flight.partial.iterdir()):
            if path.name not in files.entries:
                files.entries[path.name] = entry_of(path)
        write_manifest(flight.partial, files.entries)
        flight.asked_s = time.monotonic()
        flight.asked.set()
        flight.waits_for_others()
        if not flight.ask.accept(flight.step, str(flight.partial)):
            return UNANSWERED
        flight.moves()
        with_retries(lambda: self._give_name(flight), PUBLISH_PATIENCE_S)
        return ""

    def _give_name(self, flight: _Flight) -> None:
        newest = flight.trained >= self._newest()  # else it was written for so long that another group was faster
        publish(flight.partial, self.directory, flight.trained, newest=newest)

    def _succeeded(self, flight: _Flight, size_bytes: int) -> None:
        """Log what the checkpoint cost, and remove older checkpoints and partial ones."""
        written_s = max(flight.asked_s - flight.started_s, 1e-9)
        stall_s = flight.stall_s + (written_s if flight.waits else 0.0)
        share = f" ({100 * stall_s / flight.ask.step_s:.1f} % of a step)" if flight.ask.step_s else ""
        log.info(
            "the checkpoint of step %d counts: training waited %.1f ms%s, %d bytes were written in %.2f s (%.2f GB/s)",
            flight.trained,
            1e3 * stall_s,
            share,
            size_bytes,
            written_s,
            size_bytes / written_s / 1e9,
        )
        if self._failures:
            self.notice(f"checkpoints are written again: that of step {flight.trained} is in {self.directory}")
        self._failures = 0
        try:
            self.published(flight.trained)
            discard_partials(self.directory, flight.trained)
            gone = retire(self.directory, self.retention, flight.trained)
        except OSError as error:
            log.warning("%s cannot be tidied up: %s", self.directory, _reason(error))
            return
        if gone:
            log.info("removed the checkpoints of steps %s", ", ".join(map(str, gone)))

    def _failed(self, trained: int, reason: str, again: bool) -> None:
        """Log that a checkpoint does not count; warn the user of the first one in a row. ``again``: this save is tried
        again."""
        self._failures += 1
        self._why = reason
        log.warning("the checkpoint of step %d does not count: %s", trained, reason)
        if self._failures == 1:
            goes_on = "training goes on, the next save tries again"
            what = "it is tried again for a minute" if again else goes_on
            self.notice(f"WARNING: NO CHECKPOINT OF STEP {trained}: {reason}; {what}")


def _reason(error: Exception) -> str:
    """The disk's error as text, also where torch has raised an error of its own because of it."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, OSError):
        seen = seen.__cause__ or seen.__context__
    if isinstance(seen, OSError):
        return f"{seen.strerror}: {seen.filename}" if seen.filename else str(seen.strerror)
    return " ".join(str(error).split())[:_REASON_CHARS]
