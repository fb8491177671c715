"""Pages in a real Chromium, opened from disk: charts draw, tables sort, time zooms, themes switch, nothing loads."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvtune.report.contrast import contrast
from kvtune.report.page import compare_page, run_page
from kvtune.report.sweep_page import sweep_page
from kvtune.run.file import read_run
from kvtune.run.types import CoreInfo
from tests.golden import studies
from tests.golden.make import FOLDER
from tests.golden.synthetic import empty_run, partial_run, rounds_run
from tests.report.conftest import run_of
from tests.report.test_stacks import with_stacks

pytestmark = pytest.mark.browser

Open = Callable[..., Any]


MAKERS: dict[str, Callable[[], str]] = {
    "run": lambda: run_page(with_stacks()),
    "long": lambda: run_page(run_of("open")),
    "evictions": lambda: run_page(run_of("evictions")),
    "partial": lambda: run_page(partial_run()),
    "empty": lambda: run_page(empty_run()),
    "hostile": lambda: run_page(run_of("hostile")),
    "compare": lambda: _compared(),
    "sweep": lambda: sweep_page(studies.found(studies.grid_study())),
    "tune": lambda: sweep_page(studies.found(studies.tuned_study())),
    "thousand": lambda: sweep_page(studies.found(studies.thousand())),
    "ablation": lambda: run_page(run_of("ablation")),
    "real": lambda: run_page(read_run(FOLDER / "schema1-real.kvrun")),
}


def _compared() -> str:
    kvtune = rounds_run(hit_share=(0.0, 0.98, 0.98), core=CoreInfo(name="kvtune", active=True))
    return compare_page(contrast([run_of("rounds"), kvtune], ["a", "b"]))


@pytest.fixture(scope="module")
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


def size(page: Any, width: int) -> None:
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def scheme(page: Any, preference: str, media: str = "") -> None:
    features = [{"name": "prefers-color-scheme", "value": preference}]
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": features})


def wait(done: Callable[[], Any], seconds: float = 40) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := done():
            return found
        time.sleep(0.05)
    raise AssertionError(f"not within {seconds} s")


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


PAGES = (
    "run",
    "long",
    "partial",
    "hostile",
    "compare",
    "sweep",
    "tune",
    "thousand",
    "empty",
    "ablation",
    "real",
)


@pytest.mark.parametrize("name", [name for name in PAGES if name != "empty"])
def test_every_chart_of_a_page_is_drawn(inspected: Callable[[str], Inspected], name: str) -> None:
    drawn = inspected(name).charts
    assert len(drawn) >= 4
    for chart, state, width, height, marks, broken in drawn:
        assert state == "yes", chart
        assert width > 200 and height > 40, f"{chart} is {width} x {height}"
        assert marks > 0, f"{chart} shows nothing"
        assert not broken, chart


@pytest.mark.parametrize("name", [name for name in PAGES if name not in ("long", "thousand")])
def test_nothing_overflows_at_390_pixels(inspected: Callable[[str], Inspected], name: str) -> None:
    assert inspected(name).width_of_document <= 390
    assert inspected(name).too_wide == []


@pytest.mark.parametrize("name", PAGES)
def test_all_text_has_the_contrast_of_aa(inspected: Callable[[str], Inspected], name: str) -> None:
    assert inspected(name).pale == {"light": [], "dark": []}


def test_an_empty_run_opens(opened: Open) -> None:
    page = opened("empty")
    assert "This run failed." in page.find_element("css selector", "main").text


def test_text_paints_before_the_charts(opened: Open) -> None:
    """How long that takes is the machine's: `kvtune` promises a second, `-s` shows what it took here."""
    page = opened("long")
    paint = page.execute_script(
        "return performance.getEntriesByType('paint').find((p) => p.name === 'first-contentful-paint').startTime"
    )
    print(f"first contentful paint after {paint:.0f} ms")
    assert 0 < paint < page.execute_script("return Number(document.documentElement.dataset.charts)")


def test_hostile_strings_run_nothing(opened: Open) -> None:
    page = opened("hostile")
    assert "owned" not in page.title.replace("document.title='owned'", "")
    assert page.find_elements("css selector", "img") == []
    assert "onerror=alert(1)" in page.find_element("css selector", "h1").text


def test_a_table_sorts_by_number_both_ways(opened: Open) -> None:
    page = opened("run")
    table = page.find_element("css selector", "#gc table.sortable")
    head = next(b for b in table.find_elements("css selector", "th button") if b.text.startswith("pauses"))
    column = [b.text for b in table.find_elements("css selector", "th button")].index(head.text)

    def values() -> list[float]:
        cells = table.find_elements("css selector", f"tbody tr td:nth-child({column + 1})")
        return [float(cell.get_attribute("data-value")) for cell in cells]

    assert len(values()) == 3
    page.execute_script("arguments[0].click()", head)
    assert values() == sorted(values())
    assert head.find_element("xpath", "..").get_attribute("aria-sort") == "ascending"
    page.execute_script("arguments[0].click()", head)
    assert values() == sorted(values(), reverse=True)
    assert values()[0] != values()[-1]


def test_a_table_of_a_thousand_trials_filters_and_sorts(opened: Open) -> None:
    page = opened("thousand")
    field = page.find_element("css selector", "#trials-filter")

    def rows() -> list[list[str]]:
        return page.execute_script(  # type: ignore[no-any-return]
            """return [...document.querySelectorAll("#trials-table tbody tr")].filter((r) => r.checkVisibility())
                 .map((r) => [...r.cells].map((c) => c.textContent.trim()))"""
        )

    assert len(rows()) == 1001
    field.send_keys("pin_window=1024 block_size=64")
    assert len(rows()) == 8
    assert {(row[5], row[7]) for row in rows()} == {("1024", "64")}
    assert page.find_element("css selector", ".filter output").text == "8 of 1001"
    field.clear()
    field.send_keys("refuses")
    assert len(rows()) == 1
    field.clear()
    field.send_keys("min_drop>32 pin_window<300")
    assert {row[6] for row in rows()} == {"48", "64"}
    head = next(
        b
        for b in page.find_elements("css selector", "#trials-table th button")
        if b.text.startswith("hit rate")
    )
    page.execute_script("arguments[0].click()", head)
    rates = [float(row[2]) for row in rows()]
    assert len(rates) > 10 and rates == sorted(rates)


LANES = {
    "Step time",
    "Collections",
    "Requests",
    "Prompt tokens sent",
    "KV blocks held by requests",
    "KV blocks evicted",
    "KV blocks demoted to a lower tier",
    "Resident memory",
}


def domain(page: Any) -> tuple[float, float]:
    found = page.execute_script(
        "const d = document.querySelector('#chart-timeline').dataset; return [Number(d.from), Number(d.to)]"
    )
    return found[0], found[1]


def ticks(page: Any) -> list[str]:
    """What stands on the axes, in no order: Vega draws ticks that come back last."""
    return sorted(
        page.execute_script(
            """const axes = document.querySelectorAll("#chart-timeline .role-axis-label text");
           return [...axes].map((a) => a.textContent)"""
        )
    )


def test_buttons_and_keys_zoom_all_lanes_together(opened: Open) -> None:
    page = opened("evictions")
    lanes = page.execute_script(
        """return [...document.querySelectorAll("#chart-timeline .role-title-text")].map((t) => t.textContent)"""
    )
    assert {lane.split(" in ")[0].split(" (")[0] for lane in lanes} == LANES
    before = ticks(page)
    act = "document.querySelector('#chart-timeline [data-act={}]').click()"
    page.execute_script(act.format("in"))
    wait(lambda: ticks(page) != before)
    start, end = domain(page)
    whole = float(page.find_element("css selector", "#chart-timeline").get_attribute("data-zoom"))
    assert end - start == pytest.approx(whole / 2)
    page.execute_script(act.format("right"))
    assert domain(page)[0] > start
    plot = page.find_element("css selector", "#chart-timeline .plot")
    plot.send_keys("+")
    assert domain(page)[1] - domain(page)[0] == pytest.approx(whole / 4)
    plot.send_keys("0")
    assert domain(page) == (0, pytest.approx(whole))
    wait(lambda: ticks(page) == before)


def test_dragging_across_a_lane_zooms_to_what_was_dragged_over(opened: Open) -> None:
    from selenium.webdriver import ActionChains

    page = opened("run")
    plot = page.find_element("css selector", "#chart-timeline .plot")
    page.execute_script("arguments[0].scrollIntoView({block: 'start'})", plot)
    width = plot.size["width"]
    chain = ActionChains(page).move_to_element_with_offset(plot, 0, -plot.size["height"] // 2 + 80)
    chain.click_and_hold().move_by_offset(width // 4, 0).release().perform()
    whole = float(page.find_element("css selector", "#chart-timeline").get_attribute("data-zoom"))
    start, end = domain(page)
    assert 0.2 * whole < start < 0.6 * whole
    assert 0.15 * whole < end - start < 0.4 * whole


def test_the_theme_follows_the_reader_until_they_switch(opened: Open) -> None:
    def ground() -> str:
        return str(page.execute_script("return getComputedStyle(document.body).backgroundColor"))

    page = opened("run")
    light = ground()
    opened("run", "dark")
    dark = ground()
    assert light != dark
    button = page.find_element("css selector", "#theme")
    assert button.text == "Light theme"
    button.click()
    assert ground() == light
    bar = "return getComputedStyle(document.querySelector('#chart-causes .mark-rect path')).fill"
    in_light = page.execute_script(bar)
    button.click()
    assert ground() == dark
    assert page.execute_script(bar) != in_light, "charts follow the theme"


def test_everything_that_can_be_clicked_can_be_reached_and_named(opened: Open) -> None:
    page = opened("run")
    mute = page.execute_script(
        """return [...document.querySelectorAll("button, a, summary, [tabindex]")].filter((e) =>
             e.tabIndex < 0 || !(e.textContent.trim() || e.getAttribute("aria-label"))).map((e) => e.outerHTML)"""
    )
    assert mute == []
    from selenium.webdriver.common.keys import Keys

    page.find_element("css selector", "body").send_keys(Keys.TAB)
    assert page.switch_to.active_element.text == "Skip to the content"


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


def test_charts_fit_again_when_the_window_changes(opened: Open) -> None:
    page = opened("run")

    def width() -> float:
        """Asked in one step: a chart that is drawn anew is another element."""
        found = page.execute_script(
            "return document.querySelector('#chart-causes svg')?.getBoundingClientRect().width"
        )
        return float(found or 0)

    wide = width()
    size(page, 700)
    wait(lambda: 0 < width() < wide - 200)
