"""What a reader does with a page in a real Chromium: sort, filter, zoom, switch the theme, go by keyboard."""

from __future__ import annotations

from typing import Any

import pytest

from tests.reading.report.browsing import Open, wait

pytestmark = [pytest.mark.browser, pytest.mark.full]


def test_a_table_sorts_by_number_both_ways(opened: Open) -> None:
    page = opened("run")
    table = page.find_element("css selector", "#gc > .scroll table.sortable")
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


def test_a_folded_chart_is_drawn_where_it_is_opened(opened: Open) -> None:
    page = opened("folded")
    fold = page.find_element("css selector", "#stalls details:has(figure)")
    figure = fold.find_element("css selector", "figure")
    assert not figure.is_displayed()
    page.execute_script("arguments[0].open = true", fold)
    wait(lambda: figure.get_attribute("data-drawn") == "yes")
    assert figure.find_element("css selector", ".plot svg").size["width"] > 200


def test_a_table_of_a_thousand_trials_filters_and_sorts(opened: Open) -> None:
    page = opened("thousand")
    field = page.find_element("css selector", "#trials-1-filter")

    def rows() -> list[list[str]]:
        return page.execute_script(  # type: ignore[no-any-return]
            """return [...document.querySelectorAll("#trials-1 tbody tr")].filter((r) => r.checkVisibility())
                 .map((r) => [...r.cells].map((c) => c.textContent.trim()))"""
        )

    assert len(rows()) == 1001
    field.send_keys("pin_window=1024 block_size=64")
    assert len(rows()) == 8
    assert {(row[2], row[4]) for row in rows()} == {("1024", "64")}
    assert page.find_element("css selector", "output[for=trials-1-filter]").text == "8 of 1001"
    field.clear()
    field.send_keys("refuses")
    assert len(rows()) == 1
    field.clear()
    field.send_keys("min_drop>32 pin_window<300")
    assert {row[3] for row in rows()} == {"48", "64"}
    head = next(
        b for b in page.find_elements("css selector", "#trials-1 th button") if b.text.startswith("hit rate")
    )
    page.execute_script("arguments[0].click()", head)
    rates = [float(row[1]) for row in rows()]
    assert len(rates) > 10 and rates == sorted(rates)


LANES = {
    "Step time",
    "Collections",
    "Requests",
    "Prompt tokens sent",
    "KV blocks held by requests",
    "KV blocks evicted",
    "Resident memory",
}


def domain(page: Any) -> tuple[float, float]:
    value = page.execute_script(
        "const d = document.querySelector('#chart-timeline').dataset; return [Number(d.from), Number(d.to)]"
    )
    return value[0], value[1]


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
