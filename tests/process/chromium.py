"""Debian's Chromium for tests of the page, and why there is none."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1280,900")


def missing() -> str:
    """Why no browser can be started; empty: one can."""
    absent = [name for name in ("chromium", "chromedriver") if not shutil.which(name)]
    return f"{' and '.join(absent)} not installed: scripts/packages_for_tests.sh chromium" if absent else ""


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """A browser, as selenium's driver."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for flag in FLAGS:
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=Service(str(shutil.which("chromedriver"))))
    try:
        yield driver
    finally:
        driver.quit()
