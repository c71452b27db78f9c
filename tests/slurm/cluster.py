"""A real Slurm on this machine: munged, slurmctld and several slurmd, each a virtual node with a port of its own.

Everything lives in one folder (configuration, state, keys, logs) and is started and ended by pid; nothing of the
system's own Slurm is touched. Needs the binaries and root: :func:`missing` says what is not there.

A node's death is that of its slurmd, of every slurmstepd that it started, and of every process that runs on it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

SBIN = "/usr/sbin:/usr/local/sbin"
CPUS_PER_NODE = 8
UNTIL_S = 60.0
"""How long daemons and nodes have to be ready."""
MESSAGE_S = 10
"""MessageTimeout: how long slurmctld tries to reach a dead node; the round in which it asks the nodes lasts as long."""
DEAD_AFTER_S = 3 * MESSAGE_S
"""SlurmdTimeout: silence after which slurmctld takes a node for down.

Well above the length of a round, because slurmctld 23.11 to 24.11.5 may begin a round before it has noted the answers
of the last one. A node whose answer is younger than a third of this time is left out of a round. When that round waits
for a dead node, and the one after it is short, the node is judged by an answer as old as a round and that third.
"""
PAUSED_FOR_S = 6 * MESSAGE_S
"""SlurmdTimeout where a node stands still and comes back: srun, which tries twice to reach it, gives up before that."""
CONF = """
ClusterName={name}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
MessageTimeout={message_s}
SlurmdTimeout={dead_after_s}
KillWait=3
MinJobAge=300
InactiveLimit=0
MailProg=/bin/true
NodeName={nodes} NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports}] CPUs={cpus} RealMemory=4000
PartitionName=main Nodes={nodes} Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes={nodes} MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


def missing() -> str:
    """Why no Slurm can be started here; empty where one can."""
    if os.geteuid() != 0:
        return "a Slurm of several virtual nodes needs root"
    absent = [name for name in ("slurmctld", "slurmd", "munged", "srun") if _which(name) is None]
    return f"{', '.join(absent)} not installed (apt-get install slurm-wlm munge)" if absent else ""


class Cluster:
    """Use as a context manager: no daemon, job or file is left."""

    def __init__(self, folder: Path, nodes: int, dead_after_s: int = DEAD_AFTER_S) -> None:
        self.folder = folder
        self.dead_after_s = dead_after_s
        self.nodes = [f"n{index}" for index in range(1, nodes + 1)]
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._held = contextlib.ExitStack()
        self._conf = folder / "slurm.conf"
        self.environ = {**os.environ, "SLURM_CONF": str(self._conf)}

    def __enter__(self) -> Cluster:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """The daemons first, so that nothing new is started, then all that they started."""
        for daemon in self._daemons.values():
            daemon.kill()
            daemon.wait()
        for process in self._started():
            _signal(process, signal.SIGKILL)
        self._held.close()

    # ------------------------------------------------------------------------------------------------------ commands

    def call(self, *words: str, environ: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
        """One of Slurm's commands; its output. AssertionError with its error where it fails."""
        done = subprocess.run(
            words,
            env={**self.environ, **(environ or {})},
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, f"{' '.join(words)}: {done.stderr or done.stdout}\n{self.log()}"
        return done.stdout

    def sbatch(self, script: Path, *options: str, environ: Mapping[str, str] | None = None, cwd: Path) -> str:
        """Queue a batch script; the job's id."""
        return self.call("sbatch", "--parsable", *options, str(script), environ=environ, cwd=cwd).strip()

    def show(self, job: str) -> dict[str, str]:
        """What ``scontrol show job`` says, by field."""
        words = self.call("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def jobs(self) -> list[str]:
        """Ids of the jobs that are not over."""
        return self.call("squeue", "--noheader", "--format=%A").split()

    def log(self) -> str:
        """The end of slurmctld's log, for a failing test."""
        path = self.folder / "slurmctld.log"
        return path.read_text(errors="replace")[-3000:] if path.exists() else ""

    def states(self) -> str:
        """Of all nodes, jobs and steps, for a failing test."""
        shown = (("sinfo", "--Node", "--long"), ("squeue", "--long"), ("squeue", "--steps"))
        return "\n".join(self.call(*words) for words in shown)

    # --------------------------------------------------------------------------------------------------------- nodes

    def kill_node(self, node: str) -> None:
        """SIGKILL to a node's slurmd, to its slurmstepd and to everything that runs there, all at once: each is stopped
        before the first one dies, as else a part of srun that outlives the rest ends the whole step. Children die
        before their parents: a stopped process group whose last parent in its session dies gets SIGHUP and SIGCONT from
        the kernel, and then srun ends the whole step as well."""
        daemon = self._daemons.pop(node)
        daemon.send_signal(signal.SIGSTOP)
        dying: dict[int, psutil.Process] = {}
        while alive := {one.pid: one for one in self._started(node) if one.pid not in dying}:
            for process in alive.values():
                _signal(process, signal.SIGSTOP)
            dying |= alive
        for process in sorted(dying.values(), key=lambda one: (one.create_time(), one.pid), reverse=True):
            _signal(process, signal.SIGKILL)
        daemon.kill()
        daemon.wait()

    def start_node(self, node: str) -> None:
        """Start a node's slurmd (again)."""
        self._daemon(node, "slurmd", "-D", "-N", node, "-f", str(self._conf))

    def pause_node(self, node: str, paused: bool) -> None:
        """A node's slurmd stands still, or goes on; what runs there does not notice."""
        self._daemons[node].send_signal(signal.SIGSTOP if paused else signal.SIGCONT)

    def until_idle(self) -> None:
        """Start the nodes that were killed, and wait until all can take a job."""
        for node in self.nodes:
            if node not in self._daemons:
                self.start_node(node)
        began_s, seen = time.monotonic(), list[str]()

        def idle() -> bool:
            states = [self.state(node) for node in self.nodes]
            if not seen or not seen[-1].endswith(f": {states}"):
                seen.append(f"{time.monotonic() - began_s:.1f} s: {states}")
            return set(states) == {"idle"}

        self._until("all nodes are idle", idle, seen)

    def state(self, node: str) -> str:
        """Of a node, as sinfo says it."""
        return self.call("sinfo", "--noheader", f"--nodes={node}", "--format=%T").split()[0]

    # -------------------------------------------------------------------------------------------------------- inside

    def _start(self) -> None:
        folder = self.folder
        (folder / "state").mkdir(parents=True)
        key = folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        ports = _ports(len(self.nodes) + 1, self._held)
        host = socket.gethostname()
        self._conf.write_text(
            CONF.format(
                name=f"test{os.getpid()}",
                host=host,
                folder=folder,
                port=ports[0],
                ports=",".join(map(str, ports[1:])),
                nodes=f"n[1-{len(self.nodes)}]",
                cpus=CPUS_PER_NODE,
                message_s=MESSAGE_S,
                dead_after_s=self.dead_after_s,
            )
        )
        self._daemon(
            "munged",
            *("munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket"),
            *(f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log", f"--seed-file={folder}/munge.seed"),
        )
        self._until("munged answers", lambda: (folder / "munge.socket").exists())
        self._daemon("slurmctld", "slurmctld", "-D", "-f", str(self._conf))
        self.until_idle()

    def _daemon(self, name: str, *words: str) -> None:
        path = _which(words[0])
        assert path is not None
        with (self.folder / f"{name}.out").open("ab") as out:
            self._daemons[name] = subprocess.Popen(
                [path, *words[1:]], env=self.environ, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )

    def _until(self, what: str, true: Callable[[], bool], seen: Sequence[str] = ()) -> None:
        """Poll until ``true()``; AssertionError with what was ``seen`` meanwhile, and the logs, where it takes long."""
        deadline_s = time.monotonic() + UNTIL_S
        while True:
            with contextlib.suppress(AssertionError):
                if true():
                    return
            dead = [name for name, daemon in self._daemons.items() if daemon.poll() is not None]
            outputs = "\n".join(path.read_text(errors="replace")[-1500:] for path in sorted(self.folder.glob("*.out")))
            assert not dead, f"{dead} ended before {what}\n{outputs}\n{self.log()}"
            assert time.monotonic() < deadline_s, "\n".join(
                [f"not within {UNTIL_S:g} s: {what}", *seen, self.states(), outputs, self.log()]
            )
            time.sleep(0.1)

    def _step_daemons(self, node: str = "") -> list[psutil.Process]:
        """The slurmstepd of one node, or of all: they hide their environment, but write in their node's log."""
        log, found = f"{self.folder}/slurmd-{node}", []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, OSError):
                links = Path(f"/proc/{process.pid}/fd").iterdir() if process.name() == "slurmstepd" else ()
                if any(os.readlink(link).startswith(log) for link in links):
                    found.append(process)
        return found

    def _started(self, node: str = "") -> list[psutil.Process]:
        """What the slurmd of one node, or of all, has started."""
        return [*self._step_daemons(node), *self._processes(lambda environ: self._is_ours(environ, node))]

    def _is_ours(self, environ: Mapping[str, str], node: str = "") -> bool:
        mine = environ.get("SLURM_CONF") == str(self._conf)
        return mine and node in ("", environ.get("SLURMD_NODENAME"))

    def _processes(self, wanted: Callable[[Mapping[str, str]], bool]) -> list[psutil.Process]:
        """Processes started through this cluster, but for this one and its daemons."""
        known = {daemon.pid for daemon in self._daemons.values()} | {os.getpid()}
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if process.pid not in known and wanted(process.environ()):
                    found.append(process)
        return found


def _which(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:{SBIN}")


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def _ports(count: int, held: contextlib.ExitStack) -> Sequence[int]:
    """Ports for daemons that set SO_REUSEADDR, as Slurm's do. A bound socket that does not listen holds each until
    ``held`` is closed: such a daemon can listen on the port, and the kernel gives it to nobody who asks for any."""
    sockets = [held.enter_context(socket.socket()) for _ in range(count)]
    for one in sockets:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind(("", 0))
    return [one.getsockname()[1] for one in sockets]
