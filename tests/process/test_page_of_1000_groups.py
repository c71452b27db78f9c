"""The page of a job of 1000 groups that takes a step each second and loses some of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.polling import until
from tests.process.chromium import chromium, missing
from tests.process.page_process import Onlooker, PageProcess
from tests.process.thousand_groups import GROUPS, one_more_step, thousand_groups
from tests.pure.written_job import Written

LOST = (7, 123, 500, 999)
DRAWN_S, CORES, RESIDENT_MB = 0.1, 0.2, 200.0
"""CPU time for a change, of the thread that draws; how long a reader waits for it is benchmarks/page.py's."""


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return thousand_groups(tmp_path)


@pytest.fixture
def browser() -> Iterator[Any]:
    if missing():
        pytest.skip(missing())
    with chromium() as driver:
        yield driver


def test_a_browser_draws_a_change_with_a_tenth_of_a_second(written: Written, browser: Any) -> None:
    def shown(what: str) -> int:
        return int(browser.execute_script(f"return document.querySelectorAll('.cells .{what}').length"))

    with PageProcess(written.dir.path) as page:
        browser.get(page.url)
        until("all groups", lambda: shown("live") == GROUPS)
        browser.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
        began_s = drawing_s(browser)
        browser.execute_script("sparePage.drawMs.length = 0")
        for group in LOST:
            one_more_step(written)
            one_more_step(written, group)
        until("all losses", lambda: shown("dead") == len(LOST))
        changes = int(browser.execute_script("return sparePage.drawMs.length"))
        took_s = drawing_s(browser) - began_s
        check_keys(browser)
        check_log(browser, written)
        assert browser.get_log("browser") == [], "not a word in the console"
    print(f"{changes} events: {took_s:.3f} s of CPU time")
    assert changes >= 2 * len(LOST)
    assert 0 < took_s / changes < DRAWN_S


def drawing_s(browser: Any) -> float:
    """CPU time that the thread of the page's script has taken, in seconds."""
    found = browser.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
    return float({one["name"]: one["value"] for one in found}["TaskDuration"])


def check_keys(browser: Any) -> None:
    """Arrow keys go through the groups, Enter opens one, Escape closes it."""
    from selenium.webdriver.common.keys import Keys

    grid, detail = browser.find_element("css selector", ".cells"), browser.find_element("css selector", ".detail")
    grid.send_keys(Keys.HOME, *([Keys.ARROW_RIGHT] * LOST[0]), Keys.ENTER)
    until("the detail", lambda: f"group {LOST[0]}: dead" in detail.text)
    assert f"group {LOST[0]} exited" in detail.text, "what happened to it"
    detail.send_keys(Keys.ESCAPE)
    until("it is closed", lambda: not detail.is_displayed())
    assert browser.switch_to.active_element == grid


def check_log(browser: Any, written: Written) -> None:
    """The end of a log that is open follows the file."""
    log = written.dir.log_of(0, 0)
    log.parent.mkdir(parents=True)
    log.write_text("first\n")
    browser.execute_script("document.querySelector('.cells i').click()")
    button = "return [...document.querySelectorAll('.detail button')].find((one) => one.textContent.endsWith('.log'))"
    until("the log's name", lambda: browser.execute_script(button) is not None)
    browser.execute_script(button + ".click()")
    text = "return document.querySelector('.detail pre').textContent"
    until("the log", lambda: browser.execute_script(text) == "first\n")
    with log.open("a") as file:
        file.write("second\n")
    until("the next line", lambda: browser.execute_script(text) == "first\nsecond\n")


def test_the_process_of_the_page_needs_little(written: Written) -> None:
    """While eight look on."""
    with PageProcess(written.dir.path) as page:
        lookers = [Onlooker(page) for _ in range(8)]
        try:
            until("the whole", lambda: all(len(one.seen) >= 3 for one in lookers))
            written.job.step()
            written.go_on()
            cpu_s, began_s = page.cpu_s(), time.monotonic()
            for group in LOST[:2]:
                one_more_step(written)
                one_more_step(written, group)
            cores = (page.cpu_s() - cpu_s) / (time.monotonic() - began_s)
            until("all losses", lambda: all(one.cells(LOST[1], ["dead"]) for one in lookers))
            print(f"{cores:.3f} cores, {page.resident_mb():.0f} MB")
            assert cores < CORES
            assert page.resident_mb() < RESIDENT_MB
        finally:
            for one in lookers:
                one.close()
