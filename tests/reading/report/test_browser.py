"""How pages look in a real Chromium, opened from disk: charts draw, nothing overflows or pales, nothing loads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from tests.reading.report.browsing import Open, scheme, size, wait

pytestmark = pytest.mark.browser


CHARTS = """
return [...document.querySelectorAll("figure[data-chart]")].map((f) => {
  const svg = f.querySelector(".plot svg");
  const box = svg ? svg.getBoundingClientRect() : { width: 0, height: 0 };
  const marks = svg ? [...svg.querySelectorAll(".role-mark path, .role-mark line, .role-mark rect")] : [];
  const seen = marks.filter((m) => { const b = m.getBBox(); return b.width + b.height > 0; }).length;
  return [f.dataset.chart, f.dataset.drawn, box.width, box.height, seen, f.textContent.includes("NaN")];
})
"""

NARROW = """
return [...document.querySelectorAll("figure[data-chart]")].every((f) => {
  const plot = f.querySelector(".plot");
  return !plot.clientWidth || Math.abs(plot.clientWidth - f.dataset.width) < 9;
})
"""

OVERFLOW = """
const wide = [...document.querySelectorAll("main *")].filter((e) => {
  const box = e.getBoundingClientRect();
  return box.width && box.right > innerWidth + 1 && !e.closest(".scroll") && !e.closest("svg");
});
return [document.documentElement.scrollWidth, wide.map((e) => e.outerHTML.slice(0, 80))]
"""

CONTRASTS = """
const parse = (c) => (c.match(/[\\d.]+/g) ?? []).map(Number);
const line = (v) => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; };
const light = (c) => { const [r, g, b] = c.map(line);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
const ground = (e) => { for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor);
  if (c.length === 3 || c[3] > 0) return c.slice(0, 3); } return [255, 255, 255]; };
const bad = [];
for (const e of document.querySelectorAll("body *")) {
  const svg = e.closest("svg");
  const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
  if (!own || e.closest("tbody tr:nth-child(n+20)")) continue;
  if ( !e.getClientRects().length || ["SCRIPT", "STYLE", "NOSCRIPT"].includes(e.tagName)) continue;
  if (Number(getComputedStyle(e).opacity) === 0) continue;
  const style = getComputedStyle(e);
  const [a, b] = [light(parse(svg ? style.fill : style.color).slice(0, 3)), light(ground(e))].sort((x, y) => y - x);
  const ratio = (a + 0.05) / (b + 0.05);
  const large = parseFloat(style.fontSize) >= 24;
  if (ratio < (large ? 3 : 4.5)) bad.push([e.tagName, e.textContent.trim().slice(0, 30), ratio.toFixed(2)]);
}
return bad;
"""


@dataclass(frozen=True, slots=True)
class Inspected:
    """What one load of a page showed: its charts, text of poor contrast in both themes, what is too wide at 390 px."""

    charts: list[list[Any]]
    pale: dict[str, list[Any]]
    width_of_document: int
    too_wide: list[str]


seen: dict[str, Inspected] = {}


@pytest.fixture
def inspected(opened: Open) -> Callable[[str], Inspected]:
    """Looks at a page once, for all tests that ask."""

    def look(name: str) -> Inspected:
        if name not in seen:
            page = opened(name)
            charts, pale = page.execute_script(CHARTS), {"light": page.execute_script(CONTRASTS)}
            scheme(page, "dark")
            pale["dark"] = page.execute_script(CONTRASTS)
            size(page, 390)
            wait(lambda: page.execute_script(NARROW))
            seen[name] = Inspected(charts, pale, *page.execute_script(OVERFLOW))
        return seen[name]

    return look


KINDS = ("run", "compare", "sweep")
"""One page of each kind; the others are of these kinds with other contents."""
OTHERS = ("long", "partial", "hostile", "tune", "thousand", "empty", "real")


def pages_but(*left_out: str) -> list[Any]:
    others = (name for name in OTHERS if name not in left_out)
    return [*KINDS, *(pytest.param(name, marks=pytest.mark.full) for name in others)]


@pytest.mark.parametrize("name", pages_but("empty"))
def test_every_chart_of_a_page_is_drawn(inspected: Callable[[str], Inspected], name: str) -> None:
    drawn = inspected(name).charts
    assert len(drawn) >= 4
    for chart, state, width, height, marks, broken in drawn:
        assert state == "yes", chart
        assert width > 200 and height > 40, f"{chart} is {width} x {height}"
        assert marks > 0, f"{chart} shows nothing"
        assert not broken, chart


@pytest.mark.parametrize("name", pages_but("long", "thousand"))
def test_nothing_overflows_at_390_pixels(inspected: Callable[[str], Inspected], name: str) -> None:
    assert inspected(name).width_of_document <= 390
    assert inspected(name).too_wide == []


@pytest.mark.parametrize("name", pages_but())
def test_all_text_has_the_contrast_of_aa(inspected: Callable[[str], Inspected], name: str) -> None:
    assert inspected(name).pale == {"light": [], "dark": []}


@pytest.mark.full
def test_an_empty_run_opens(opened: Open) -> None:
    page = opened("empty")
    assert "This run failed." in page.find_element("css selector", "main").text


@pytest.mark.full
def test_text_paints_before_the_charts(opened: Open) -> None:
    """How long that takes is the machine's: `kvtune` promises a second, `-s` shows what it took here."""
    page = opened("long")
    paint = page.execute_script(
        "return performance.getEntriesByType('paint').find((p) => p.name === 'first-contentful-paint').startTime"
    )
    print(f"first contentful paint after {paint:.0f} ms")
    assert 0 < paint < page.execute_script("return Number(document.documentElement.dataset.charts)")


def test_charts_are_drawn_before_the_page_has_loaded(browser: Any, opened: Open) -> None:
    """Whoever prints or captures a page at its load event gets no holes."""
    at_load = {
        "source": "addEventListener('load', () => { window.atLoad = document.documentElement.dataset.ready; })"
    }
    script = browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", at_load)
    page = opened("run")
    browser.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", script)
    assert page.execute_script("return window.atLoad") == "yes"
    assert page.execute_script("return document.querySelectorAll('iframe').length") == 0


def test_the_first_card_has_the_bar_of_hits_and_misses(opened: Open) -> None:
    page = opened("run")
    bar = page.execute_script(
        "return document.querySelector('main section').querySelectorAll('#chart-causes .mark-rect path').length"
    )
    assert bar > 1


def test_hostile_strings_run_nothing(opened: Open) -> None:
    page = opened("hostile")
    assert "owned" not in page.title.replace("document.title='owned'", "")
    assert page.find_elements("css selector", "img") == []
    assert "onerror=alert(1)" in page.find_element("css selector", "h1").text


@pytest.mark.full
def test_a_page_prints_with_its_charts_in_light_colours(opened: Open) -> None:
    page = opened("run", "dark")
    scheme(page, "dark", "print")
    ink = page.execute_script("return getComputedStyle(document.querySelector('main p')).color")
    assert ink == page.execute_script(
        "const c = getComputedStyle(document.documentElement).getPropertyValue('--soft').trim();"
        "const e = document.body.appendChild(document.createElement('i')); e.style.color = c;"
        "return getComputedStyle(e).color"
    )
    assert (
        page.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    )
    assert page.execute_script("return getComputedStyle(document.querySelector('nav')).display") == "none"
    printed = page.execute_cdp_cmd("Page.printToPDF", {})
    assert len(printed["data"]) > 20_000


@pytest.mark.full
def test_charts_fit_again_when_the_window_changes(opened: Open) -> None:
    page = opened("run")

    def width() -> float:
        """Asked in one step: a chart that is drawn anew is another element."""
        value = page.execute_script(
            "return document.querySelector('#chart-causes svg')?.getBoundingClientRect().width"
        )
        return float(value or 0)

    wide = width()
    size(page, 700)
    wait(lambda: 0 < width() < wide - 200)
