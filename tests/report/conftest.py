"""Runs to draw, and a real browser to look at what was drawn."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtune.run.types import Run
from tests.golden import synthetic

KINDS: dict[str, Callable[[], Run]] = {
    "rounds": synthetic.rounds_run,
    "open": synthetic.open_run,
    "partial": synthetic.partial_run,
    "empty": synthetic.empty_run,
    "hostile": synthetic.hostile_run,
    "sim": synthetic.sim_run,
    "bare": synthetic.bare_run,
    "evictions": synthetic.evicting_run,
    "ablation": synthetic.ablated_run,
}
made: dict[str, Run] = {}


def run_of(kind: str) -> Run:
    if kind not in made:
        made[kind] = KINDS[kind]()
    return made[kind]


def words(html: str) -> str:
    """A page's text: each argument of a command is an element of its own."""
    return html.replace('<span class="w">', "").replace("</span>", "").replace("<wbr>", "")


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
