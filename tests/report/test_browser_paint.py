"""Charts draw within a second in browsers that report no paint, in a headless one and in print, none of which waits."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.report.browsing import wait

pytestmark = [pytest.mark.browser, pytest.mark.full]

READY = "return document.documentElement.dataset.ready"
DRAWN = "[...document.querySelectorAll('figure[data-chart]')].filter((f) => f.dataset.drawn === 'yes').length"

NO_PAINT = """
PerformanceObserver.prototype.observe = () => {};
window.longest = 0;
const timeout = window.setTimeout;
window.setTimeout = (act, ms, ...more) => { longest = Math.max(longest, ms ?? 0); return timeout(act, ms, ...more); };
"""

# No timer comes in time either.
NOTHING = f"""
PerformanceObserver.prototype.observe = () => {{}};
window.setTimeout = () => 0;
addEventListener("afterprint", () => {{ window.printed = {DRAWN}; }});
"""


@contextmanager
def before_each_page(browser: Any, script: str) -> Iterator[None]:
    """Runs a script before any of a page's own."""
    added = browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": script})
    try:
        yield
    finally:
        browser.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)


def test_a_browser_that_reports_no_paint_draws_within_a_second(
    browser: Any, pages: Callable[[str], Path]
) -> None:
    with before_each_page(browser, NO_PAINT):
        browser.get(pages("run").as_uri())
        wait(lambda: browser.execute_script(READY))
    assert browser.execute_script(f"return {DRAWN}") >= 4
    assert 0 < browser.execute_script("return longest") <= 1000


def test_a_page_that_is_printed_at_once_has_its_charts(browser: Any, pages: Callable[[str], Path]) -> None:
    with before_each_page(browser, NOTHING):
        browser.get(pages("run").as_uri())
        assert browser.execute_script(f"return {DRAWN}") == 0
        browser.execute_cdp_cmd("Page.printToPDF", {})
        charts = browser.execute_script("return document.querySelectorAll('figure[data-chart]').length")
    assert browser.execute_script("return window.printed") == charts >= 4


def test_headless_chromium_has_the_charts_after_a_second(
    pages: Callable[[str], Path], tmp_path: Path
) -> None:
    """Of its own virtual time, in which drawing takes none."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("Chromium is not installed (Debian: apt-get install chromium chromium-driver)")
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=1000", "--dump-dom")
    command = [chromium, *flags, f"--user-data-dir={tmp_path}", pages("run").as_uri()]
    page = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    assert page.count('data-drawn="yes"') >= 4 and 'data-ready="yes"' in page
