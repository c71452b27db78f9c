"""spare-drain RUN_DIR lets groups leave a job that trains, for maintenance or because their machine
shows errors.

A group finishes the step in flight, leaves with its commit, and costs the others nothing but its
share of later steps; nobody computes a piece twice. Its place stays free, or a standby takes it,
until --undo. The last live host of a shard cannot leave.
"""

from __future__ import annotations

import argparse
import asyncio
import getpass
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence

import grpc

from spare_megatron.cli.commands import command
from spare_megatron.config.errors import ConfigError
from spare_megatron.config.exits import ExitCode
from spare_megatron.config.plural import counted
from spare_megatron.config.version_flag import add_version
from spare_megatron.control_plane import control_pb2 as pb
from spare_megatron.control_plane.channel import Security, call_once, open_channel, security_of
from spare_megatron.control_plane.tls_files import tls_fault
from spare_megatron.monitor.group_numbers import numbered_groups
from spare_megatron.runtime.run_directory import RunDirectory, glance

EXAMPLE = """examples:
  spare-drain runs/first --group 2 --reason "ECC errors"
  spare-drain runs/first --node gpu-0317
  spare-drain runs/first --group 2 --undo"""
CALL_S = 5.0
REPLACED_S = 20.0
"""How long a coordinator is called that does not answer: another one is started, or takes over, within that time."""
TLS_S = 1.0
LOOK_S = 0.2
GONE_S = 120.0
"""How long status.json may stay the same before nobody waits any more: the groups of such a job leave by then."""
REASON_MAX = 200
"""Characters of a reason: it goes into lines of the output."""
GROUPS_MAX = 1 << 20


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        "spare-drain", description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_version(made)
    made.add_argument("run_dir", metavar="RUN_DIR", help="the --run-dir of the job")
    made.add_argument("--group", type=_group, action="append", default=[], metavar="G", help="a group; may be repeated")
    made.add_argument("--node", default="", metavar="HOST", help="all groups with a rank on this node")
    made.add_argument("--reason", default="", metavar="TEXT", help="what for; it is in the journal and the messages")
    made.add_argument("--undo", action="store_true", help="they may stay, or be started again where they have left")
    made.add_argument("--no-wait", action="store_true", help="do not wait until they have left")
    made.add_argument("--tls-dir", default="", metavar="DIR", help="that of the job, where it uses mutual TLS")
    return made


def _group(text: str) -> int:
    if not text.isdecimal() or int(text) >= GROUPS_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is no group; groups have numbers from 0 on")
    return int(text)


def ask(run_dir: RunDirectory, request: pb.DrainRequest, tls_dir: str) -> pb.DrainAnswer:
    """The answer, with the groups that leave, or may stay. A coordinator that is just being replaced is waited for.
    Raises ConfigError where the coordinator refuses or cannot be reached."""
    security, until_s = security_of(run_dir, tls_dir), time.monotonic() + REPLACED_S
    while True:
        known = run_dir.coordinator()
        if known is None:
            raise ConfigError(f"{run_dir.path} has no coordinator.json; give the --run-dir of a job that trains")
        try:
            answer = asyncio.run(_call(known.address, security, request))
        except grpc.RpcError as error:
            where, code = f"the coordinator of {run_dir.path} at {known.address}", error.code()
            if code is grpc.StatusCode.UNAUTHENTICATED:
                raise ConfigError(f"{where} refused the job token: it is that of another job") from None
            fault = tls_fault(known.address, security.tls_dir, TLS_S)
            if not fault and time.monotonic() < until_s and not run_dir.ended.exists():
                time.sleep(LOOK_S)
                continue
            raise ConfigError(
                fault or f"{where} does not answer ({code.name}); look at spare-status whether the job still runs"
            ) from None
        if answer.refusal:
            raise ConfigError(answer.refusal)
        return answer


async def _call(address: str, security: Security, request: pb.DrainRequest) -> pb.DrainAnswer:
    async with open_channel(address, security, CALL_S) as channel:
        answer: pb.DrainAnswer = await call_once(channel, "Drain", security, request, CALL_S, pb.DrainAnswer)
        return answer


def departures(run_dir: RunDirectory, groups: Sequence[int], epoch: int) -> Iterator[tuple[int, int | None]]:
    """(group, the step that was committed last) as they leave; no step for those that the end of the job, or the
    taking back of the request, finds there. status.json is written a while after what it tells of: one of before
    ``epoch``, that of the answer to the request, tells nothing. Raises ConfigError where nobody writes it any more."""
    there, before = set(groups), dict[int, int | None]()
    seen, since_s = None, time.monotonic()
    while there:
        status = glance(run_dir.status)
        if status != seen:
            seen, since_s = status, time.monotonic()
        elif time.monotonic() - since_s > GONE_S:
            raise ConfigError(
                f"the coordinator of {run_dir.path} has written no status for {GONE_S:g} s, so it is not known whether "
                f"{numbered_groups(there)} left; look at spare-status whether the job still runs"
            )
        if status is not None and status["epoch"] >= epoch:
            over = status["phase"] != "running"
            for group in sorted(there):
                now = status["live"].get(str(group))
                out = now is None or now != before.setdefault(group, now)  # another has its place
                if out or over or group not in status.get("drained", []):
                    there.remove(group)
                    yield group, status["step"] if out and not over else None
        time.sleep(LOOK_S if there else 0.0)


def user() -> str:
    """Who asks; the number of a user without a name, as containers have it."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # KeyError before Python 3.13
        return f"user {os.getuid()}"


@command("spare-drain")
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code (spare_megatron.config.exits)."""
    made = parser()
    args = made.parse_args(argv)
    if not args.group and not args.node:
        made.error("say which: --group G (may be repeated) or --node HOST")
    run_dir = RunDirectory(args.run_dir)
    reason = " ".join(args.reason.split())[:REASON_MAX]
    what = f" ({reason})" if reason else ""
    by = f"spare-drain by {user()} on {socket.gethostname()}{what}"
    request = pb.DrainRequest(groups=args.group, hosts=_addresses(args.node), reason=by, undo=args.undo)
    answer = ask(run_dir, request, args.tls_dir)
    groups = list(answer.groups)
    who = f"{counted(len(groups), 'group')} ({', '.join(map(str, groups))})"
    if args.undo:
        sys.stdout.write(f"{who} may stay or be started again\n")
        return int(ExitCode.FINISHED)
    sys.stdout.write(
        f"{who} will leave with the next commit that can do without {'it' if len(groups) == 1 else 'them'}\n"
    )
    sys.stdout.flush()
    try:
        for group, step in departures(run_dir, groups, answer.epoch) if not args.no_wait else ():
            how = f"has left; step {step} is committed" if step is not None else "has not left"
            sys.stdout.write(f"group {group} {how}\n")
            sys.stdout.flush()
    except KeyboardInterrupt:
        sys.stdout.write("nobody waits any more; the request stands until --undo\n")
    return int(ExitCode.FINISHED)


def _addresses(node: str) -> list[str]:
    """The name of a node and its numbers. Raises ConfigError where it has none."""
    if not node:
        return []
    try:
        found = socket.getaddrinfo(node, None)
    except OSError as error:
        raise ConfigError(f"--node {node}: {error.strerror or error}; give a name or number of a node") from None
    return list(dict.fromkeys([node, *(str(entry[4][0]) for entry in found)]))


if __name__ == "__main__":
    sys.exit(main())
