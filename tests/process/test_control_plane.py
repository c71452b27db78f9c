"""The control plane in real processes: deaths, stops, hangs, a killed coordinator, impostors. Torch-free ranks.

Every job's journal is replayed at its end. Time bounds are the protocol's own time-outs plus generous slack.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc.aio
import pytest

from spare_megatron.cli import drain
from spare_megatron.config.errors import ConfigError
from spare_megatron.config.exits import ExitCode
from spare_megatron.control_plane import control_pb2 as pb
from spare_megatron.control_plane.channel import Security, call_once, open_channel
from spare_megatron.control_plane.tls_files import NO_TLS, TLS_FILES, TLS_NAME
from spare_megatron.coordinator.journal import Record
from spare_megatron.launch.attempt_report import note_end
from spare_megatron.protocol.messages import Hello, JoinersLate, Lost, Opened, SendFenced
from spare_megatron.runtime.failpoints import VARIABLE
from tests.process.control_job import ControlJob

HEARTBEAT_S = 2.0
SLOW = "--piece-s 0.01 --steps 40"
PATIENT = f"{SLOW} --heartbeat-timeout-s 10"
"""Beside other tests."""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., ControlJob]]:
    """Makes jobs; ends whatever they started."""
    made: list[ControlJob] = []

    def make(groups: int = 3, size: int = 2, flags: str = SLOW) -> ControlJob:
        made.append(ControlJob(tmp_path / str(len(made)), groups, size, flags))
        return made[-1]

    yield make
    for one in made:
        one.close()


def losses(one: ControlJob) -> list[Lost]:
    """All Lost events of the journal."""
    return [record.event for record in one.records() if isinstance(record.event, Lost)]


def test_an_undisturbed_job_commits_every_step_once(job: Callable[..., ControlJob]) -> None:
    one = job(2, 2, "--steps 30")
    note_end(one.run_dir, ExitCode.FAILED)  # of an earlier launcher
    one.start()
    assert one.finish() == ExitCode.FINISHED
    assert set(one.exits().values()) == {ExitCode.FINISHED}
    one.check_steps(30)
    assert not one.run_dir.ended.exists()
    assert all(line["pieces_computed"] == line["pieces"] == 8 for line in one.metrics())
    assert one.run_dir._token.stat().st_mode & 0o777 == 0o600
    assert "iteration       30/      30" in one.output("coordinator")


def test_killed_ranks_are_seen_by_their_closed_connections(job: Callable[..., ControlJob]) -> None:
    """No launcher reports the exits here: position 0 closes its stream, position 1 its connection to the leader."""
    one = job(4)
    one.start()
    for number, (group, position) in enumerate(((0, 0), (2, 1)), 1):
        before = one.committed()
        one.until(lambda before=before: one.committed() >= before + 5)  # type: ignore[misc]
        one.kill(group, position)
        one.until(lambda number=number: len(losses(one)) == number)  # type: ignore[misc]
        assert [(loss.group, loss.cause) for loss in losses(one)[-1].losses] == [(group, "closed")]
        lost = losses(one)[-1].losses[0].position
        assert lost in ((-1, 0) if position == 0 else (1,)), "the leader ends with position 0, and may say so before"
    assert one.finish() == ExitCode.FINISHED
    one.check_steps(40)
    assert len(losses(one)) == 2
    assert one.metrics()[-1]["live_groups"] == 2
    assert one.exits()[2, 0] == ExitCode.FENCED, "the rest of the group is notified"


def test_stopped_ranks_are_fenced_and_find_themselves_so(job: Callable[..., ControlJob]) -> None:
    one = job(4, flags="--piece-s 0.01 --steps 80")
    one.start()
    for number, (group, position) in enumerate(((0, 0), (2, 1)), 1):
        before = one.committed()
        one.until(lambda before=before: one.committed() >= before + 5)  # type: ignore[misc]
        one.kill(group, position, signal.SIGSTOP)
        one.until(lambda number=number: len(losses(one)) == number)  # type: ignore[misc]
        assert [(x.group, x.position, x.cause) for x in losses(one)[-1].losses] == [(group, position, "silent")]
        before = one.committed()
        one.until(lambda before=before: one.committed() > before)  # type: ignore[misc]
        one.kill(group, position, signal.SIGCONT)
        assert one.ranks[group, position].wait(30) == ExitCode.FENCED
        assert "fenced" in one.output(f"rank-{group}-{position}-0")
    assert one.finish() == ExitCode.FINISHED
    one.check_steps(80)
    assert len(losses(one)) == 2


def test_a_hang_is_found_by_the_progress_counter(job: Callable[..., ControlJob]) -> None:
    """Its heartbeats go on; only its training thread stands still while the others wait."""
    one = job(flags=f"{SLOW} --heartbeat-timeout-s 1 --progress-timeout-s 2")
    one.start_coordinator()
    one.environment["SPARE_INJECT"] = "hang:group=1,position=1,step=6,at=forward,n=2"
    for group in range(3):
        one.start_group(group)
    assert one.finish() == ExitCode.FINISHED
    one.check_steps(40)
    [lost] = losses(one)
    assert [(loss.group, loss.position, loss.cause) for loss in lost.losses] == [(1, 1, "stalled")]
    assert "step 6, forward, 2 pieces done" in lost.losses[0].detail
    assert one.ranks[1, 1].wait(30) == 1, "a hung training thread does not keep its process"


def test_two_groups_lost_together_make_one_epoch(job: Callable[..., ControlJob]) -> None:
    one = job(4, 1, f"{SLOW} --offsets 0,1,3")
    one.start()
    one.until(lambda: one.committed() >= 5)
    assert one.coordinator is not None
    one.coordinator.send_signal(signal.SIGSTOP)  # it shall learn of both at once, however slow this test runs
    for group in (0, 2):
        one.kill(group, 0)
        one.ranks[group, 0].wait()
    one.coordinator.send_signal(signal.SIGCONT)
    assert one.finish() == ExitCode.FINISHED
    one.check_steps(40)
    [lost] = losses(one)
    assert [loss.group for loss in lost.losses] == [0, 2]
    assert one.metrics()[-1]["epoch"] == 2


def test_a_killed_coordinator_goes_on_where_it_was(job: Callable[..., ControlJob]) -> None:
    """Twice; no training process restarts, no step is lost, no line of metrics.jsonl is missing or there twice."""
    one = job(flags="--steps 60 --piece-s 0.002")
    one.start()
    for at in (10, 30):
        one.until(lambda at=at: one.committed() >= at)  # type: ignore[misc]
        one.kill_coordinator()
        one.start_coordinator()
    assert one.finish() == ExitCode.FINISHED
    assert set(one.exits().values()) == {ExitCode.FINISHED}
    one.check_steps(60)
    assert losses(one) == []
    assert [e.event.fencing for e in one.records() if isinstance(e.event, Opened)] == [1, 2, 3]
    assert all(line["loss"] is not None for line in one.metrics())
    lines = [text for text in one.output("coordinator").splitlines() if " iteration " in text]
    assert len(lines) == 60 // 5, "Megatron's line appears once per interval, whoever printed it"


def test_a_group_that_dies_while_the_coordinator_is_away(job: Callable[..., ControlJob]) -> None:
    one = job()
    one.start()
    one.until(lambda: one.committed() >= 10)
    one.kill_coordinator()
    for position in (0, 1):
        one.kill(0, position)
        one.ranks[0, position].wait()  # on a busy machine they and their leader live on for a while
    one.start_coordinator()
    assert one.finish() == ExitCode.FINISHED
    one.check_steps(40)
    [lost] = losses(one)
    assert [(loss.group, loss.cause) for loss in lost.losses] == [(0, "silent")]


def test_a_stale_incarnation_is_fenced(job: Callable[..., ControlJob]) -> None:
    one = job(flags="--piece-s 0.01 --steps 300")
    one.start()
    one.until(lambda: one.committed() >= 5)
    one.kill(1, 0)
    one.kill(1, 1)
    one.until(lambda: bool(losses(one)))
    one.start_group(1, incarnation=0)
    assert one.ranks[1, 0].wait(30) == ExitCode.FENCED
    assert one.ranks[1, 1].wait(30) == ExitCode.FENCED
    assert "is not in the live set" in one.output("rank-1-1-0")
    refused = [r.actions for r in one.records() if isinstance(r.event, Hello) and r.actions]
    assert any(isinstance(actions[0], SendFenced) for actions in refused)
    assert one.coordinator is not None
    one.coordinator.terminate()
    assert one.finish() == ExitCode.REQUEUE
    one.check_steps(one.committed())


@pytest.mark.parametrize(
    ("size", "who"), [(1, "group 1 incarnation 0"), (2, "rank 1 of group 1")], ids=["a group", "a rank of a group"]
)
def test_a_place_belongs_to_one_process(job: Callable[..., ControlJob], size: int, who: str) -> None:
    """Of a group of several the second process of a rank that is not the leader's: the first one's leader knows it."""
    one = job(size=size, flags="--piece-s 0.01 --steps 300")
    one.start()
    one.until(lambda: one.committed() >= 5)
    first = one.ranks[1, size - 1]
    one.start_rank(1, size - 1)
    assert one.ranks[1, size - 1].wait(30) == ExitCode.FENCED
    assert f"{who} is there already, as another process" in one.output(f"rank-1-{size - 1}-0")
    committed = one.committed()
    one.until(lambda: one.committed() >= committed + 20)
    assert losses(one) == []
    first.kill()  # it is still watched
    one.until(lambda: bool(losses(one)))
    assert one.coordinator is not None
    one.coordinator.terminate()
    assert one.finish() == ExitCode.REQUEUE
    process_nonces = [r.event.process_nonce for r in one.records() if isinstance(r.event, Hello)]
    assert len(set(process_nonces)) == len(process_nonces) == one.groups
    one.check_steps(one.committed())


def test_a_wrong_token_is_one_sentence(job: Callable[..., ControlJob]) -> None:
    one = job(2, 1)
    one.start_coordinator()
    one.run_dir._token.write_text("another job's token")
    one.start_group(0)
    assert one.ranks[0, 0].wait(30) == ExitCode.BAD_INPUT
    text = one.output("rank-0-0-0")
    assert "refused the job token" in text
    assert len(text.splitlines()) == 1
    assert one.records() == []


def test_a_coordinator_that_is_not_there_is_one_sentence(job: Callable[..., ControlJob]) -> None:
    one = job(2, 1, "--heartbeat-timeout-s 0.5")
    one.start_coordinator()
    one.kill_coordinator()
    one.start_group(0)
    assert one.ranks[0, 0].wait(60) == ExitCode.BAD_INPUT
    text = one.output("rank-0-0-0")
    assert "no coordinator is reachable at 127.0.0.1:" in text
    assert len(text.splitlines()) == 1


def test_an_address_that_nobody_can_reach_is_one_sentence(job: Callable[..., ControlJob]) -> None:
    one = job(2, 2, PATIENT)
    one.start_coordinator()
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        good = ("--address", f"127.0.0.1:{listener.getsockname()[1]}")
        one.start_rank(0, 0, flags=good)
        one.start_rank(0, 1, flags=("--address", address))
        assert one.ranks[0, 1].wait(30) == ExitCode.BAD_INPUT
        one.start_rank(0, 1)
        one.until(lambda: any(isinstance(record.event, Hello) for record in one.records()))
        for position in range(2):
            one.start_rank(1, position, flags=("--address", address) if position == 0 else ())
        assert one.ranks[1, 0].wait(30) == ExitCode.BAD_INPUT, one.output("rank-1-0-0")
    for name, text in (
        ("rank 1 of group 0", one.output("rank-0-1-0")),
        ("rank 0 of group 1", one.output("rank-1-0-0")),
    ):
        assert f"{name} listens for the other groups at {address}, which cannot be reached: " in text
        assert "give --spare-interface" in text


def test_two_ranks_that_tell_one_address_are_named(job: Callable[..., ControlJob]) -> None:
    one = job(2, 2, PATIENT)
    one.start_coordinator()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        same = ("--address", f"127.0.0.1:{listener.getsockname()[1]}")
        one.start_rank(0, 0, flags=same)
        one.start_rank(0, 1, flags=same)
        assert one.ranks[0, 1].wait(30) == ExitCode.BAD_INPUT
        assert f"rank 1 of group 0 listens for the other groups at {same[1]}, and so does rank 0 of it" in one.output(
            "rank-0-1-0"
        )
        one.start_rank(0, 1)
        one.until(lambda: any(isinstance(record.event, Hello) for record in one.records()))
        one.start_rank(1, 0)
        one.start_rank(1, 1, flags=same)
        assert one.ranks[1, 0].wait(30) == ExitCode.BAD_INPUT, one.output("rank-1-0-0")
        assert "rank 1 of group 1 listens for" in one.output("rank-1-0-0")
        assert "and so does rank 0 of group 0" in one.output("rank-1-0-0")


def test_of_two_that_come_at_once_with_one_address_one_is_refused(job: Callable[..., ControlJob]) -> None:
    one = job(2, 3, PATIENT)
    one.start_coordinator()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        same = ("--address", f"127.0.0.1:{listener.getsockname()[1]}")
        for position in range(3):
            one.start_rank(0, position, flags=same if position else ())
        pair = [one.ranks[0, position] for position in (1, 2)]
        one.until(lambda: any(rank.poll() is not None for rank in pair))
        refused = 1 if pair[0].poll() is not None else 2
        assert one.ranks[0, refused].wait(30) == ExitCode.BAD_INPUT
        assert f"and so does rank {3 - refused} of it" in one.output(f"rank-0-{refused}-0")
        assert one.ranks[0, 3 - refused].poll() is None


def test_a_group_that_runs_another_job_is_given_what_differs(job: Callable[..., ControlJob]) -> None:
    one = job(2, 2, PATIENT)
    one.start_coordinator()
    one.start_group(0)
    one.until(lambda: any(isinstance(record.event, Hello) for record in one.records()))
    one.start_group(1, flags=("--identity", "other"))
    for position in range(2):
        assert one.ranks[1, position].wait(30) == ExitCode.BAD_INPUT
        assert "model is other, elsewhere same" in one.output(f"rank-1-{position}-0")
    for position in range(2):
        one.kill(0, position)
    one.kill_coordinator()
    one.start_coordinator("--life", "2")
    one.start_group(0, 1, flags=("--identity", "other"))  # it may: all groups of this job attempt are alike
    sentence = "job attempt 2 is not the same job as the attempt before it: model is other, before same"
    one.until(lambda: sentence in one.output("coordinator"))


def test_the_coordinator_keeps_other_jobs_out_of_the_checkpoints_where_no_launcher_does(
    job: Callable[..., ControlJob], tmp_path: Path
) -> None:
    flags = f"{PATIENT} --steps 100000 --offsets 0 --saves-into {tmp_path / 'save'}"
    one, two = (job(1, 1, flags) for _ in range(2))
    one.start()
    one.until(lambda: one.committed() >= 1)
    one.kill_coordinator()
    one.start_coordinator()
    two.start_coordinator()
    two.start_group(0)
    assert two.ranks[0, 0].wait(30) == ExitCode.BAD_INPUT
    refused = f"--save {tmp_path / 'save'} is in use by the job of {one.run_dir.path} (pid "
    assert refused in two.output("rank-0-0-0")


def test_two_coordinators_with_one_run_directory(job: Callable[..., ControlJob]) -> None:
    one = job()
    published = one.start_coordinator()
    second = one.popen("second", ["spare_megatron.cli.coordinator", "--run-dir", str(one.run_dir.path)])
    assert second.wait(30) == ExitCode.BAD_INPUT
    text = one.output("second")
    assert "is in use by spare-coordinator (pid" in text
    assert len(text.splitlines()) == 1
    assert one.run_dir.coordinator() == published, "nothing is overwritten"


def test_a_port_in_use_is_one_sentence(job: Callable[..., ControlJob]) -> None:
    one, other = job(), job()
    address = one.start_coordinator().address
    command = ["spare_megatron.cli.coordinator", "--run-dir", str(other.run_dir.path), "--listen", address]
    assert other.popen("second", command).wait(30) == ExitCode.BAD_INPUT
    text = other.output("second")
    assert f"cannot listen on {address}: Address already in use; use port 0" in text
    assert len(text.splitlines()) == 1


def test_a_journal_that_does_not_replay_is_one_sentence(job: Callable[..., ControlJob]) -> None:
    one = job(2, 1, f"{PATIENT} --steps 5")
    one.start()
    one.finish()
    text = one.run_dir.journal.read_text()
    one.run_dir.journal.write_text(text.replace("is committed in epoch 1", "was committed"))
    command = ["spare_megatron.cli.coordinator", "--run-dir", str(one.run_dir.path)]
    assert one.popen("second", command).wait(30) == ExitCode.BAD_INPUT
    assert "use another run directory" in one.output("second")
    assert len(one.output("second").splitlines()) == 1


def test_sigterm_saves_and_leaves(job: Callable[..., ControlJob]) -> None:
    one = job(flags="--piece-s 0.01 --steps 1000")
    one.start()
    one.until(lambda: one.committed() >= 5)
    assert one.coordinator is not None
    one.coordinator.terminate()
    assert one.finish() == ExitCode.REQUEUE
    assert set(one.exits().values()) == {ExitCode.FINISHED}
    steps = one.committed()
    one.check_steps(steps)
    assert steps < 1000


def test_a_stopped_coordinator_declares_nobody_dead(job: Callable[..., ControlJob]) -> None:
    one = job()
    one.start()
    one.until(lambda: one.committed() >= 5)
    assert one.coordinator is not None
    one.coordinator.send_signal(signal.SIGSTOP)
    time.sleep(1.5 * HEARTBEAT_S)  # the passing of the time-out is what is tested
    one.coordinator.send_signal(signal.SIGCONT)
    assert one.finish() == ExitCode.FINISHED
    one.check_steps(40)
    assert losses(one) == []


def certificates(directory: Path) -> None:
    """A certificate authority and one certificate for all processes of a job."""
    directory.mkdir()

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=directory, check=True, capture_output=True)

    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj")
    openssl("req", "-x509", *curve, "/CN=authority", "-keyout", "ca.key", "-out", "ca.pem", "-days", "1")
    openssl("req", *curve, f"/CN={TLS_NAME}", "-keyout", "key.pem", "-out", "cert.csr")
    (directory / "names").write_text(f"subjectAltName=DNS:{TLS_NAME}\n")
    signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names", "-days", "1")
    openssl("x509", "-req", "-in", "cert.csr", *signing, "-out", "cert.pem")


def test_mutual_tls(job: Callable[..., ControlJob], tmp_path: Path) -> None:
    tls, other = tmp_path / "tls", tmp_path / "other"
    certificates(tls)
    certificates(other)
    one = job(2, 2, "--steps 10 --heartbeat-timeout-s 1")
    one.start_coordinator("--tls-dir", str(tls))
    one.start_group(0, flags=("--tls-dir", str(tls)))
    one.start_group(1, flags=("--tls-dir", str(other)))
    assert one.ranks[1, 0].wait(30) == ExitCode.BAD_INPUT
    text = one.output("rank-1-0-0")
    assert f"has a certificate that does not fit ca.pem in {other} (" in text
    assert len(text.splitlines()) == 1
    one.start_group(1, flags=("--tls-dir", str(tls)))
    assert one.finish() == ExitCode.FINISHED
    one.check_steps(10)
    (tls / TLS_FILES[2]).unlink()
    bad = one.popen("bad", ["spare_megatron.cli.coordinator", "--run-dir", str(tmp_path / "x"), "--tls-dir", str(tls)])
    assert bad.wait(30) == ExitCode.BAD_INPUT
    assert f"{TLS_FILES[2]} is not in the TLS directory" in one.output("bad")


@pytest.mark.parametrize("at_coordinator", [True, False])
def test_tls_at_one_end_only_is_one_sentence(
    job: Callable[..., ControlJob], tmp_path: Path, at_coordinator: bool
) -> None:
    tls = tmp_path / "tls"
    certificates(tls)
    one = job(2, 1, "--heartbeat-timeout-s 1")
    one.start_coordinator("--tls-dir", str(tls) if at_coordinator else NO_TLS)
    one.start_group(0, flags=("--tls-dir", NO_TLS if at_coordinator else str(tls)))
    assert one.ranks[0, 0].wait(30) == ExitCode.BAD_INPUT
    text = one.output("rank-0-0-0")
    assert ("speaks TLS, and this process has no files for it" if at_coordinator else "speaks no TLS") in text
    assert len(text.splitlines()) == 1
    assert one.records() == []
    with pytest.raises(ConfigError, match="speaks TLS, and" if at_coordinator else "speaks no TLS, and"):
        drain.ask(one.run_dir, pb.DrainRequest(groups=[0]), NO_TLS if at_coordinator else str(tls))
    (one.run_dir.path / "token").write_text("the token of another job")
    with pytest.raises(ConfigError, match="refused the job token: it is that of another job"):
        drain.ask(one.run_dir, pb.DrainRequest(groups=[0]), str(tls) if at_coordinator else NO_TLS)


def test_a_job_that_others_reach_makes_its_own_certificates(job: Callable[..., ControlJob]) -> None:
    """Every process finds them in the run directory; who has none, or none of this job, is not received."""
    one = job(2, 2, "--steps 400 --piece-s 0.01")
    known = one.start_coordinator("--listen", "0.0.0.0:0")
    for group in range(2):
        one.start_group(group)
    one.until(lambda: one.committed() >= 5)
    token = one.run_dir.token()
    for security in (Security(token), Security(token, str(one.run_dir.path / "tls"))):

        async def ask(security: Security = security) -> None:
            async with open_channel(known.address, security, 2.0) as channel:
                await call_once(channel, "RequestStop", security, pb.StopRequest(reason="enough"), 2.0)

        if security.tls_dir:
            asyncio.run(ask())
        else:
            with pytest.raises(grpc.aio.AioRpcError):
                asyncio.run(ask())
            assert one.committed() < 400
    assert one.finish() == ExitCode.FINISHED, one.outputs()
    assert set(one.exits().values()) == {ExitCode.FINISHED}, one.outputs()
    assert one.committed() < 400


def test_a_group_that_comes_back_learns_and_nobody_waits_for_it(job: Callable[..., ControlJob]) -> None:
    """Nothing carries the state to it here: it is a learner, in no epoch, until the job is over."""
    one = job(3, 1, "--piece-s 0.01 --steps 100000")
    one.start()
    one.until(lambda: one.committed() >= 3)
    one.kill(2, 0)
    one.until(lambda: len(losses(one)) == 1)
    one.start_group(2, incarnation=1)

    def back() -> list[Record]:
        return [record for record in one.records() if isinstance(record.event, Hello) and record.event.incarnation == 1]

    one.until(lambda: bool(back()))
    before = one.committed()
    one.until(lambda: one.committed() >= before + 20)
    assert one.coordinator is not None
    one.coordinator.terminate()
    assert one.finish() == ExitCode.REQUEUE
    assert "is to be brought up to date" in back()[0].reason
    assert not any(isinstance(record.event, JoinersLate) for record in one.records())
    assert len(losses(one)) == 1
    assert one.exits()[2, 0] == ExitCode.FINISHED
    one.check_steps(one.committed())


@pytest.mark.parametrize("where", ["rank-1-1:report.arrival", "rank-1-0:report.arrival", "rank-1-1:group-N.json.read"])
def test_a_rank_that_hangs_while_it_starts_is_not_waited_for_beyond_the_startup_time_out(
    job: Callable[..., ControlJob], where: str
) -> None:
    """--spare-min-groups, which is 2 here, decides then."""
    one = job(2, 2, "--steps 20 --startup-timeout-s 6")
    one.environment[VARIABLE] = f"{where}=sleep:1000"
    one.start()
    assert one.finish() == ExitCode.FAILED, one.outputs()
    assert "1 of 2 groups came within 6 s, fewer than --spare-min-groups 2" in one.output("coordinator")
