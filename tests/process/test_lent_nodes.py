"""Agents of lent nodes (spare-agent) and the launcher's server for them, as real processes, without Slurm."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from spare_megatron.control_plane import control_pb2 as pb
from spare_megatron.control_plane.channel import Security, security_of
from spare_megatron.launch.group_restarts import GroupStart
from spare_megatron.launch.lent_nodes import LentNode, LentNodes, NodeNeeds, start_order
from spare_megatron.runtime.run_directory import RunDirectory

ROOT = Path(__file__).resolve().parents[2]
RANK = """import os, sys, time
seen = [os.environ.get(name) for name in ("LOCAL_RANK", "NVTE_FLASH_ATTN", "ATEN_CPU_CAPABILITY", "HOME")]
open(os.environ["SPARE_RUN_DIR"] + "/rank-" + os.environ["SPARE_POSITION"], "w").write(" ".join(map(str, seen)))
time.sleep(float(sys.argv[1]))
"""


@dataclass
class Job:
    """A launcher that takes nodes, and what it said and was notified."""

    run_dir: RunDirectory
    security: Security
    reported: list[str] = field(default_factory=list)
    nodes: list[LentNode] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    may_leave: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, node: LentNode) -> None:
        self.nodes.append(node)

    async def leave(self, node: LentNode, why: str) -> None:
        await self.may_leave.wait()

    def lose(self, node: LentNode) -> None:
        self.left.append(node.name)

    @asynccontextmanager
    async def serving(self, needs: NodeNeeds) -> AsyncIterator[LentNodes]:
        async with LentNodes(self.run_dir, self.security, "127.0.0.1:0", needs, self.reported.append) as lent:
            lent.user = self
            yield lent

    async def agent(self, *words: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "spare_megatron.cli.agent", str(self.run_dir.path), "--name", "n9", *words),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "HOME": "/home", "ATEN_CPU_CAPABILITY": "default"},
        )


async def until(true: Callable[[], object]) -> None:
    """Wait until it is so."""
    async with asyncio.timeout(60):
        while not true():
            await asyncio.sleep(0.02)


def played(tmp_path: Path, play: Callable[[Job], Awaitable[None]]) -> Job:
    """Play with a job in a new run directory."""
    run_dir = RunDirectory(tmp_path / "run")
    run_dir.create()

    async def main() -> Job:
        job = Job(run_dir, security_of(run_dir, "none", create=True))
        await play(job)
        return job

    return asyncio.run(main())


def needs(tmp_path: Path) -> NodeNeeds:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    return NodeNeeds(str(tmp_path), [str(script)], 2)


async def reported_at_end(agent: asyncio.subprocess.Process) -> tuple[int, str]:
    out, _ = await asyncio.wait_for(agent.communicate(), 60)
    return agent.returncode or 0, out.decode()


def order(job: Job, start: GroupStart, seconds: float) -> pb.StartRanks:
    ranks = [
        pb.RankPlace(position=3 + n, local_rank=n, log=str(job.run_dir.logs / f"{start.incarnation}-{n}"))
        for n in (0, 1)
    ]
    environ = {"SPARE_RUN_DIR": str(job.run_dir.path), "HOME": "/nowhere", "NVTE_FLASH_ATTN": "0"}
    return start_order(start, ("rank.py", str(seconds)), environ, ranks)


def test_an_agent_runs_ranks_until_it_is_released(tmp_path: Path) -> None:
    """Ranks end, are killed by a check of their group, and live until the node may leave; then nothing is left."""

    async def play(job: Job) -> None:
        ended: list[tuple[int, int]] = []

        def start(incarnation: int, seconds: float) -> None:
            one = GroupStart(1, incarnation)
            node.start(one, order(job, one, seconds), lambda status: ended.append((incarnation, status)))

        async with job.serving(needs(tmp_path)):
            agent = await job.agent("--places", "2", "--until-eof")
            await until(lambda: job.nodes)
            [node] = job.nodes
            assert (node.name, node.places, node.usable) == ("n9", 2, True)
            start(0, 0.0)
            await until(lambda: ended == [(0, 0)])
            assert [(job.run_dir.path / f"rank-{m}").read_text() for m in (3, 4)] == [
                "0 0 None /home",
                "1 0 None /home",
            ]
            start(1, 600.0)
            assert await node.check(1, "") is None
            await until(lambda: ended[1:] == [(1, 1)])
            fault = await node.check(1, "echo ECC errors; exit 3")
            assert fault is not None
            assert (fault.kind, fault.sentence) == ("command", "n9: --spare-health-check: exit code 3: ECC errors")
            start(2, 600.0)
            assert agent.stdin is not None
            agent.stdin.close()
            await until(lambda: not node.usable)
            assert len(node.starts) == 1, "its ranks live until the node is released"
            job.may_leave.set()
            assert await reported_at_end(agent) == (0, "spare-agent: n9 leaves: the node n9 is not needed any more\n")
            await until(lambda: job.left == ["n9"])
            assert ended[2:] == [(2, 1)]
            with pytest.raises(OSError, match="has left"):
                start(3, 0.0)
        assert not job.run_dir.launcher.exists()

    job = played(tmp_path, play)
    assert job.reported == [
        "the node n9 is lent to the job, with room for 2 ranks",
        "the lent node n9 is to leave: it was asked to leave",
        "the lent node n9 has left",
    ]


def test_a_node_whose_agent_is_killed_is_lost_and_the_end_of_the_job_ends_another_agent(tmp_path: Path) -> None:
    async def play(job: Job) -> None:
        ended: list[int] = []
        async with job.serving(needs(tmp_path)):
            agent = await job.agent("--places", "2")
            await until(lambda: job.nodes)
            start = GroupStart(0, 5)
            job.nodes[0].start(start, order(job, start, 600.0), ended.append)
            await until(lambda: (job.run_dir.path / "rank-4").exists())
            agent.send_signal(signal.SIGKILL)
            await until(lambda: ended == [1])
            fault = await job.nodes[0].check(0, "")
            assert fault is not None
            assert fault.sentence == "the lent node n9 has left"
            await agent.communicate()
            other = await job.agent("--places", "2")
            await until(lambda: len(job.nodes) == 2)
        assert (await reported_at_end(other))[0] == 0

    played(tmp_path, play)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ("versions", "the node n9 is not taken: it has Python"),
        ("gpus", "the node n9 is not taken: it has no GPU, and the job NVIDIA H100; lend nodes of that kind"),
        ("places", "it has room for 1 rank, and a group has 2 on a node; give --ntasks-per-node=2"),
        ("data", "it cannot read /nowhere/data.bin; mount there what the job reads"),
        ("token", "does not answer (the job token is wrong or missing)"),
        ("over", "no job runs in"),
    ],
)
def test_a_node_that_does_not_fit_is_not_taken(tmp_path: Path, wrong: str, sentence: str) -> None:
    """One sentence on both sides; the launcher takes the next one."""

    async def play(job: Job) -> None:
        base = needs(tmp_path)
        asked = NodeNeeds(
            base.directory,
            ["/nowhere/data.bin"] if wrong == "data" else base.paths,
            base.least_places,
            "Python 2.7" if wrong == "versions" else base.versions,
            ["NVIDIA H100"] if wrong == "gpus" else base.gpus,
        )
        if wrong == "over":
            code, text = await reported_at_end(await job.agent())
            assert (code, text.count("\n")) == (2, 1)
            assert sentence in text
            return
        async with job.serving(asked):
            if wrong == "token":
                (job.run_dir.path / "token").write_text("the token of another job")
            code, text = await reported_at_end(await job.agent("--places", "1" if wrong == "places" else "2"))
            assert code == 2
            assert sentence in text
            assert text.count("\n") == 1
            assert not job.nodes
            assert wrong == "token" or any(sentence in reported for reported in job.reported)

    played(tmp_path, play)
