"""Stands for torch's ``ProcessGroupNCCL`` where there is no GPU: it holds and calls things as torch's C++ does.

Read in torch/csrc/distributed/c10d of torch 2.9, and in the headers of 2.14.1. The functions named here are those of
ProcessGroupNCCL.cpp
where no other file is named; line numbers are those of the headers that torch 2.14.1 installs.

=====================================  ================================================================================
what torch does                        where
=====================================  ================================================================================
holds the store as a C++ pointer       ``store_``, ProcessGroupNCCL.hpp:1302 and 1307; the Python object may die, and
                                       its methods then raise "Not implemented" (init.cpp:245). A ``PrefixStore``
                                       (PrefixStore.hpp:72) does the same, so one of torch's own holds it here.
reads blocking wait when it is made    the constructor; ``blockingWait_``, ProcessGroupNCCL.hpp:1455. Unless it is set,
                                       ``Watchdog::start``.
shares the unique id                   ``broadcastUniqueNCCLID``: rank 0 ``set``, the others ``get``, 128 bytes
initialises without waiting            ``initNCCLComm`` and ``NCCLComm::create`` where ``config.blocking`` is 0
waits for the initialisation           ``NCCLComm::getNcclComm`` and ``waitReady`` (NCCLUtils.hpp:303), in the first
                                       collective, for ``nccl_nonblocking_timeout()`` (NCCLUtils.hpp:216), a static
waits in ``Work.wait`` on the host     ``WorkNCCL::wait`` where ``blockingWait_``; it raises an exception of the work
does not in ``Work.synchronize``       ``WorkNCCL::synchronizeStream``
finds NCCL's errors                    ``WorkNCCL::isCompleted``, ``checkForNCCLErrorsInternal``
aborts in a thread, and joins it       ``abort``: ``std::async`` and ``waitForFutureOrTimeout``; the future's destructor
                                       waits also after the time-out
acts in a watchdog                     ``Watchdog::runLoop``: on an error ``broadcastDumpSignal`` calls ``store_->set``,
                                       then it sleeps for four times ``getDumpTimeout`` (15 s)
waits for that in its destructor       ``~ProcessGroupNCCL``: ``watchdog_->join``
=====================================  ================================================================================

NCCL reads NCCL_RUNTIME_CONNECT when the first communicator of a process is made and keeps it (its ``param.h``). Where
it is not 0, the first collective connects, and waits for the others inside the call.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

UNIQUE_ID = bytes(range(128))
DUMP_S = 2.0
"""For how long a watchdog sleeps after an error; 60 s in torch."""
WAIT_S = 30.0
ONCE = {"TORCH_NCCL_NONBLOCKING_TIMEOUT": "1800", "NCCL_RUNTIME_CONNECT": "1"}
"""What is read once in a process, and its default."""

VARIABLES = (*ONCE, "TORCH_NCCL_BLOCKING_WAIT", "TORCH_NCCL_RANKS_PER_ROOT")


class Nccl:
    """What one process keeps of NCCL, and what the members of one communicator know of each other inside it."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.connected: set[int] = set()
        self.issued: dict[int, int] = {}
        """Operations of each member."""
        self.given: dict[int, list[torch.Tensor]] = {}
        """Operation -> what members have given so far, where they wait for each other's."""
        self.made: list[Record] = []
        self.dead_in_init: frozenset[int] = frozenset()
        """Members that never connect: they died after they were reached."""
        self.failed: frozenset[int] = frozenset()
        """Members whose communicator has an asynchronous error."""
        self.abort_fails = False
        self.abort_hangs = threading.Event()
        """While it is set, aborts do not return."""
        self.kernel_ends_with_abort = True
        self._environment: dict[str, str] = {}

    def environment(self) -> dict[str, str]:
        """What the first communicator of the process has found."""
        if not self._environment:
            self._environment.update({name: os.environ.get(name, default) for name, default in ONCE.items()})
        return self._environment


class Record:
    """What is known of one process group, also when that is gone."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.inside = ""
        self.issued = 0
        self.blocking = False
        self.high_priority = False
        self.sizes: list[tuple[str, int, int]] = []
        """Of each collective: its name, elements, and the offset of the first one in its storage."""
        self.aborting = self.aborted = False
        self.store_calls = 0


class Options:
    """Stands for ``ProcessGroupNCCL.Options``."""

    def __init__(self) -> None:
        self.config = SimpleNamespace(blocking=-1)
        self.is_high_priority_stream = False


class Work:
    """Stands for ``WorkNCCL``."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group, self.number = group, group.record.issued

    def synchronize(self) -> None:
        """Order streams."""

    def is_completed(self) -> bool:
        return self._error() or self.group.complete(self.number)

    def wait(self) -> None:
        if self.group.record.blocking:
            deadline_s = time.monotonic() + WAIT_S
            while not self.is_completed():
                assert time.monotonic() < deadline_s, "the host waits in Work.wait"
                time.sleep(0.001)
        if self._error():
            raise dist.DistBackendError("NCCL error: remote process exited or there was a network error")

    def _error(self) -> bool:
        return self.group.rank in self.group.nccl.failed


class ProcessGroup:
    """Stands for ``ProcessGroupNCCL``."""

    process: Nccl
    Options = Options

    def __init__(self, store: dist.Store, rank: int, size: int, options: Any) -> None:
        assert options.config.blocking == 0
        self.rank, self.size, self.nccl = rank, size, self.process
        self.store = dist.PrefixStore("", store)  # which holds the C++ object
        self.record = Record()
        self.record.blocking = os.environ.get("TORCH_NCCL_BLOCKING_WAIT") == "1"
        self.record.high_priority = options.is_high_priority_stream
        self.nccl.made.append(self.record)
        self._over = threading.Event()
        self._watchdog: threading.Thread | None = None
        if not self.record.blocking:
            given = (self.nccl, rank, self.store, self._over)
            self._watchdog = threading.Thread(target=_watch, args=given, daemon=True)
            self._watchdog.start()

    def __del__(self) -> None:
        self._over.set()
        if self._watchdog is not None:
            self._watchdog.join()

    @contextlib.contextmanager
    def _call(self, name: str) -> Iterator[None]:
        record = self.record
        assert not record.inside, f"{name} while another thread is inside {record.inside}"
        assert not record.aborting, f"{name} after the abort"
        record.calls.append((name, threading.get_ident()))
        record.inside = name
        try:
            yield
        finally:
            record.inside = ""

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Returns at once, as in torch, when the unique id is shared through the store."""
        with self._call("connect"):
            self.nccl.environment()
            if self.rank == 0:
                self.store.set("0", UNIQUE_ID)
            elif self.store.get("0") != UNIQUE_ID:
                raise dist.DistBackendError("Invalid size for ncclUniqueId")
        with self.nccl.changed:
            if self.rank not in self.nccl.dead_in_init:
                self.nccl.connected.add(self.rank)
                self.nccl.changed.notify_all()

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Work:
        return self._issue("allreduce", tensors[0])

    def _issue(self, name: str, tensor: torch.Tensor) -> Work:
        nccl, record = self.nccl, self.record
        environment = nccl.environment()
        with self._call(name), nccl.changed:
            limit_s = float(environment["TORCH_NCCL_NONBLOCKING_TIMEOUT"])
            if not nccl.changed.wait_for(lambda: len(nccl.connected) == self.size, limit_s):
                raise dist.DistBackendError("NCCL timeout in: waitReady")
            record.issued += 1
            nccl.issued[self.rank] = record.issued
            nccl.changed.notify_all()
            if environment["NCCL_RUNTIME_CONNECT"] != "0":
                assert nccl.changed.wait_for(lambda: self.complete(record.issued), limit_s), (
                    "the peers have not connected"
                )
            record.sizes.append((name, tensor.numel(), tensor.storage_offset()))
            Event.watched.group = self
        return Work(self)

    def complete(self, number: int) -> bool:
        """Its operation of this number has ended on this member's device."""
        with self.nccl.changed:
            ended = self.record.aborted and self.nccl.kernel_ends_with_abort
            return ended or sum(issued >= number for issued in self.nccl.issued.values()) == self.size

    def abort(self) -> None:
        """Ends what runs. Returns when NCCL's abort has, however long that takes."""
        with self._call("abort"):
            self.record.aborting = True
            done = threading.Thread(target=self._abort, daemon=True)
            done.start()
            done.join()
            self._over.set()
            if self.nccl.abort_fails:
                raise dist.DistBackendError("NCCL error: unhandled cuda error")

    def _abort(self) -> None:
        time.sleep(0.05)
        self.record.aborted = True
        while self.nccl.abort_hangs.is_set():
            time.sleep(0.01)


def _watch(nccl: Nccl, rank: int, store: dist.Store, over: threading.Event) -> None:
    while not over.wait(0.02):
        if rank in nccl.failed:
            with contextlib.suppress(RuntimeError):
                store.set("exception_dump", b"\0" * 4)
            time.sleep(DUMP_S)
            return


class Event:
    """Stands for ``torch.cuda.Event``: of the sum that its thread issued last."""

    watched = threading.local()

    def record(self, stream: object) -> None:
        """What it is about."""
        self.group: ProcessGroup = Event.watched.group
        self.number = self.group.record.issued

    def query(self) -> bool:
        """Over by now."""
        return self.group.complete(self.number)


class SummingProcessGroup(ProcessGroup):
    """One whose operations are done when they return."""

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Work:
        work = self._issue("allreduce", tensors[0])
        tensors[0].copy_(torch.stack(self._of_all(tensors[0])).sum(0))
        return work

    def _reduce_scatter_base(self, mine: torch.Tensor, whole: torch.Tensor, options: Any) -> Work:
        work = self._issue("reduce_scatter", mine)
        assert mine.data_ptr() == whole.data_ptr() + self.rank * mine.nbytes, "in place"
        mine.copy_(torch.stack(self._of_all(whole)).sum(0).view(self.size, -1)[self.rank])
        whole.view(self.size, -1)[: self.rank] = 7  # it is room for NCCL's work
        return work

    def _allgather_base(self, whole: torch.Tensor, mine: torch.Tensor) -> Work:
        work = self._issue("allgather", mine)
        assert mine.data_ptr() == whole.data_ptr() + self.rank * mine.nbytes, "in place"
        whole.copy_(torch.cat(self._of_all(mine)))
        return work

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Work:
        work = self._issue("broadcast", tensors[0])
        tensors[0].copy_(self._of_all(tensors[0])[options.rootRank])
        return work

    def _of_all(self, mine: torch.Tensor) -> list[torch.Tensor]:
        """What the members have given to the same operation, in the order of their ranks."""
        nccl = self.nccl
        with nccl.changed:
            given = nccl.given.setdefault(self.record.issued, [torch.empty(0)] * self.size)
            given[self.rank] = mine.clone()
            nccl.changed.notify_all()
            assert nccl.changed.wait_for(lambda: all(map(len, given)), WAIT_S)
            return given


def install(monkeypatch: pytest.MonkeyPatch, group: type[ProcessGroup] = ProcessGroup) -> Nccl:
    """Put the stand-ins in torch's place, in a process without an NCCL_* variable."""
    nccl = Nccl()
    for one in (ProcessGroup, SummingProcessGroup):
        monkeypatch.setattr(one, "process", nccl, raising=False)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", group, raising=False)
    for name, stand_in in {
        "Event": Event,
        "Stream": lambda device, priority=0: SimpleNamespace(priority=priority),
        "device": lambda device: contextlib.nullcontext(),
        "stream": lambda stream: contextlib.nullcontext(),
        "synchronize": lambda device: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    for name in {*VARIABLES, *(name for name in os.environ if "NCCL" in name)}:
        monkeypatch.setenv(name, "")  # so that it is removed again behind the test
        monkeypatch.delenv(name)
    return nccl
