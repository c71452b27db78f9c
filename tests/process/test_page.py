"""The page of a real job that loses a group and gets it back, attacked and killed meanwhile."""

from __future__ import annotations

import contextlib
import re
import socket
from dataclasses import dataclass

import pytest

from spare_megatron.coordinator.journal import Record
from spare_megatron.monitor.page.event_streams import STREAMS_MAX
from spare_megatron.protocol.messages import Lost, SendView
from tests.polling import until
from tests.process.chromium import chromium, missing
from tests.process.harness import launch
from tests.process.page_process import Onlooker, PageProcess
from tests.process.returning import check_same, failure_free_weights, leave_whole, records

pytestmark = pytest.mark.timeout(200)
GROUPS, PIECES, MOST_STEPS = 4, 1, 400
DEAD = 2
ATTACKERS = 1000
REPORTED_WITHIN = 4
"""Steps, each of which takes 0.25 s and more where a machine is busy. The page looks every 0.5 s."""
CLASSES = """
  window.changed = [];
  const cell = document.querySelectorAll(".cells i")[arguments[0]];
  new MutationObserver(() => changed.push([Date.now() / 1000, cell.className])).observe(cell, { attributes: true });
"""


@dataclass(frozen=True)
class Watched:
    """A job that was watched, and what was seen of it."""

    lost_s: float
    """When the journal's record of the loss was written."""
    back_s: float
    """When that of the return was."""
    commits_s: list[float]
    """When each step was committed."""
    first: Onlooker
    """Looked on until the page was killed."""
    second: Onlooker
    """Looked on at the page that was started in its place."""
    changed: list[tuple[float, str]]
    """(when, class) of the group's cell in a browser; empty where there is none."""
    answers: list[int]
    """The status of each event stream that attackers wanted."""
    digests: dict[int, set[str]]
    """Step -> digests of the weights."""

    def steps(self, since_s: float, until_s: float) -> int:
        """How many steps were committed between two moments."""
        return sum(since_s < at_s <= until_s for at_s in self.commits_s)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    path = tmp_path_factory.mktemp("watched")
    token = path / "token"
    token.write_text("a token that nobody guesses\n")
    shown = path / "shown"  # the harness takes processes that name the run directory for the job's
    shown.symlink_to(path / "run")
    words = ("--steps", str(MOST_STEPS), "--pieces", str(PIECES), "--piece-s", "0.25", "--redundancy", "3")
    words += ("--grace-s", "6")  # a busy launcher reports the end of a process before its closed connection is a death
    job = launch(path / "run", *words, "--spare-max-group-restarts", "3", groups=GROUPS, group_size=1)
    with contextlib.ExitStack() as stack:
        stack.callback(job.end)
        job.wait_for_step(1)
        page = stack.enter_context(PageProcess(shown, token_file=token))
        browser = None if missing() else stack.enter_context(chromium())
        first = Onlooker(page)
        stack.callback(first.close)
        if browser is not None:
            browser.get(page.url)
            until(
                "cells",
                lambda: browser.execute_script("return document.querySelectorAll('.cells .live').length") == GROUPS,
            )
            browser.execute_script(CLASSES, DEAD)
        job.kill(*job.pids(DEAD))
        until("the loss", lambda: first.cells(DEAD, ["dead", "learning"]))
        answers = attack(page)
        until("the return", lambda: returns(first), timeout_s=90.0)
        changed = [] if browser is None else browser.execute_script("return changed")
        page.process.kill()
        first.join()
        again = stack.enter_context(PageProcess(shown, token_file=token, port=page.port))
        second = Onlooker(again)
        stack.callback(second.close)
        until("all that happened", lambda: second.reported("return"))
        if browser is not None:
            state = "return document.getElementById('state').textContent"
            until("the browser's new connection", lambda: browser.execute_script(state) == "live")
        digests = leave_whole(job, GROUPS, (DEAD, 1))
        until("the end", lambda: second.reported("end"))
    reported = records(job)
    lost_s = next(record.time_unix_s for record in reported if isinstance(record.event, Lost))
    back_s = next(record.time_unix_s for record in reported if (DEAD, 1) in _members(record))
    commits_s = [line["time_unix_s"] for line in job.metrics]
    return Watched(lost_s, back_s, commits_s, first, second, changed, answers, digests)


def returns(looker: Onlooker) -> list[float]:
    """When it was notified that the group is a member after its loss; before that it is notified of its speed."""
    gone_s = looker.cells(DEAD, ["dead", "learning"])[0]
    return [at_s for at_s in looker.cells(DEAD, ["live"]) if at_s > gone_s]


def _members(record: Record) -> set[tuple[int, int]]:
    """Whom the views that were sent then name."""
    return {one for action in record.actions if isinstance(action, SendView) for one in action.view.live}


def attack(page: PageProcess) -> list[int]:
    """Wrong tokens, paths out of the directory, other methods, a request that never ends, and very many event streams,
    which stay open until all have an answer; the answers to these."""
    for token in ("", "a token", "x" * 5000):
        assert page.ask("/events", token=token)[0] == page.ask("/runs/0/logs?name=token", token=token)[0] == 401
    for path in ("/../../token", "/runs/0/logs?name=../token", "/runs/0/logs?group=0&name=%2e%2e/%2e%2e/token"):
        assert page.ask(path)[0] == 404
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert page.ask("/runs/0/groups/0", method=method)[0] == 405
    for words in (
        b"no HTTP\r\n\r\n",
        b"GET /\xd9\xa3?\xff HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 9999,
    ):
        with (
            socket.create_connection(("127.0.0.1", page.port), timeout=20) as one,
            contextlib.suppress(ConnectionError),
        ):
            one.sendall(words)
            assert b" 200 " not in one.recv(64)
    request = f"GET /events?token={page.token.replace(' ', '%20')} HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    answers = []
    with contextlib.ExitStack() as stack:
        many = []
        for number in range(ATTACKERS):
            many.append(stack.enter_context(socket.create_connection(("127.0.0.1", page.port), timeout=20)))
            many[-1].sendall(request.encode() + (b"" if number == 0 else b"\r\n"))
        for one in many[1:]:
            answers.append(int(one.recv(64).split()[1]))
        assert page.ask("/metrics")[0] == 200, "it serves others meanwhile"
    until("free streams", lambda: _is_open(page))
    return answers


def _is_open(page: PageProcess) -> bool:
    with socket.create_connection(("127.0.0.1", page.port), timeout=20) as one:
        one.sendall(f"GET /events?token={page.token.replace(' ', '%20')} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        return b" 200 " in one.recv(64)


def test_a_loss_and_the_return_are_notified_within_a_few_steps(watched: Watched) -> None:
    gone_s = watched.first.cells(DEAD, ["dead", "learning"])[0]
    back_s = returns(watched.first)[0]
    print(f"reported {gone_s - watched.lost_s:.3f} s after the loss, {back_s - watched.back_s:.3f} s after the return")
    assert gone_s >= watched.lost_s
    assert back_s >= watched.back_s
    assert watched.steps(watched.lost_s, gone_s) <= REPORTED_WITHIN
    assert watched.steps(watched.back_s, back_s) <= REPORTED_WITHIN


def test_events_say_what_happened(watched: Watched) -> None:
    [failure] = watched.first.reported("failure")
    assert failure["text"] == f"group {DEAD} (rank 0) exited: killed by SIGKILL"
    # a survivor may have reported its failed sum first, which begins an epoch of the same groups
    assert re.search(r"epoch [23] with 3 of 4 groups", failure["why"])
    assert failure["cost"]
    assert failure["back"].startswith(f"group {DEAD} after ")
    assert len(watched.first.reported("return")) == 1


def test_event_streams_are_bounded(watched: Watched) -> None:
    """One looked on already, and perhaps a browser; one more sent no whole request."""
    served = watched.answers.count(200)
    assert STREAMS_MAX - 2 <= served < STREAMS_MAX
    assert watched.answers.count(503) == ATTACKERS - 1 - served


def test_a_page_that_was_killed_tells_the_same_once_it_is_started_again(watched: Watched) -> None:
    story = [
        [(one["text"], one["why"]) for one in seen.reported("failure")] for seen in (watched.first, watched.second)
    ]
    assert story[0] == story[1]
    [end] = watched.second.reported("end")
    assert "job attempt 1 ends, left: " in end["text"]
    assert watched.second.seen[0][1] == {"runs": ["run"]}
    assert watched.second.seen[1][1]["whole"] is True


def test_the_job_did_not_notice(watched: Watched) -> None:
    """Its weights are those that one engine computes which has all pieces."""
    failure_free = failure_free_weights(max(watched.digests), GROUPS, PIECES)
    check_same(watched.digests, {step: {digest} for step, digest in enumerate(failure_free)})


def test_a_browser_shows_the_loss_and_the_return_within_a_few_steps(watched: Watched) -> None:
    if missing():
        pytest.skip(missing())
    states = [(at_s, name.split()[0]) for at_s, name in watched.changed]
    gone_s = next(at_s for at_s, name in states if name in ("dead", "learning"))
    back_s = next(at_s for at_s, name in states if name == "live" and at_s > gone_s)
    print(f"shown {gone_s - watched.lost_s:.3f} s after the loss, {back_s - watched.back_s:.3f} s after the return")
    assert watched.steps(watched.lost_s, gone_s) <= REPORTED_WITHIN
    assert watched.steps(watched.back_s, back_s) <= REPORTED_WITHIN
