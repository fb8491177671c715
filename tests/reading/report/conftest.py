"""Runs to draw, and a real browser to look at what was drawn."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtune.data.run.types import Run
from tests.reading.report.browsing import MAKERS, Open, scheme, size, wait
from tests.reading.report.drawn import KINDS, run_of


@pytest.fixture(params=list(KINDS))
def any_run(request: pytest.FixtureRequest) -> Run:
    return run_of(request.param)


@pytest.fixture
def rounds() -> Run:
    return run_of("rounds")


@pytest.fixture
def hostile() -> Run:
    return run_of("hostile")


@pytest.fixture
def long_run() -> Run:
    return run_of("open")


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Headless Chromium with its console and network logs; skips plainly where it is not installed."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("Chromium is not installed (Debian: apt-get install chromium chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    profile: Path = tmp_path_factory.mktemp("chromium")
    for flag in (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--disable-dev-shm-usage",
        f"--user-data-dir={profile}",
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    started = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    started.set_script_timeout(60)
    yield started
    started.quit()


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A page's file, drawn when first asked for."""
    folder = tmp_path_factory.mktemp("pages")

    def page(name: str) -> Path:
        path = folder / f"{name}.html"
        if not path.exists():
            path.write_text(MAKERS[name](), encoding="utf-8")
        return path

    return page


@pytest.fixture
def opened(browser: Any, pages: Callable[[str], Path]) -> Iterator[Open]:
    """Opens a page and waits until its charts are drawn. At the end: no error on the console, no request at all."""

    def go(name: str, preference: str = "light") -> Any:
        size(browser, 1200)
        scheme(browser, preference)
        browser.get(pages(name).as_uri())
        wait(lambda: browser.execute_script("return document.documentElement.dataset.ready"))
        return browser

    browser.get("about:blank")
    for log in ("browser", "performance"):
        browser.get_log(log)
    yield go
    problems = [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]
    assert problems == []
    sent = [
        message["params"]["request"]["url"]
        for entry in browser.get_log("performance")
        if (message := json.loads(entry["message"])["message"])["method"] == "Network.requestWillBeSent"
    ]
    assert [url for url in sent if not url.startswith(("file:", "data:", "about:"))] == []
    assert [url for url in sent if url.startswith("file:") and not url.endswith(".html")] == []
