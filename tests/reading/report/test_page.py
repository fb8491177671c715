"""Pages as text: nothing from outside, everything escaped, small, complete for every kind of run."""

from __future__ import annotations

import json
import re
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvtune.answers.tune.study import view
from kvtune.base.errors import UsageError
from kvtune.base.files import write_new
from kvtune.data.run.extras import Remedy, Replayed, StackFunction, StackSamples
from kvtune.data.run.file import read_run
from kvtune.data.run.types import CoreInfo, Run, WorkloadInfo, empty_table
from kvtune.data.show.page import document_page
from kvtune.reading.analysis.rebuild import workload_of
from kvtune.reading.analysis.run import RunAnalysis
from kvtune.reading.report.comparison import document
from kvtune.reading.report.contrast import contrast
from kvtune.reading.report.names import load_text
from tests.golden import studies
from tests.golden.make import FOLDER
from tests.golden.synthetic import HOSTILE, rounds_run
from tests.reading.report.drawn import KINDS, run_of, run_page, study_page, words

NAMESPACES = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink", "http://www.w3.org/2000/xmlns/"}
LOADING = {
    "src",
    "href",
    "action",
    "data",
    "poster",
    "srcset",
    "formaction",
    "background",
    "ping",
    "manifest",
}


class Elements(HTMLParser):
    """Every element with its attributes, and the text of the scripts that run."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text: list[str] = []
        self._in = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._in = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._in = ""

    def handle_data(self, data: str) -> None:
        if self._in == "script":
            self.scripts[-1] += data
        elif self._in != "style":
            self.text.append(data)


@cache
def page_of(kind: str) -> str:
    """Drawn once a kind: most tests only read it."""
    return run_page(RunAnalysis(run_of(kind)))


DRAWN = ("rounds", "partial", "hostile")
"""Kinds of run whose pages `make test` looks through; those of all in `make full`."""


@pytest.fixture(params=[pytest.param(k, marks=() if k in DRAWN else pytest.mark.full) for k in KINDS])
def any_page(request: pytest.FixtureRequest) -> str:
    return page_of(request.param)


@pytest.fixture(scope="module")
def pair() -> tuple[Run, Run]:
    kvtune = CoreInfo(name="kvtune", active=True, settings={"pin_window": 1024})
    return rounds_run(), rounds_run(hit_share=(0.0, 0.98, 0.98), core=kvtune)


def embedded(html: str, name: str) -> Any:
    match = re.search(rf'<script type="application/json" id="{name}">(.*?)</script>', html, re.DOTALL)
    assert match is not None
    return json.loads(match[1])


def test_a_page_names_no_address_but_xml_namespaces(any_page: str) -> None:
    html = any_page
    assert set(re.findall(r"https?://[^\s\"'`)\\<>;,]+", html)) <= NAMESPACES
    for tag, attributes in Elements(html).elements:
        assert tag not in ("iframe", "object", "embed", "base", "form", "img", "audio", "video", "link") or (
            tag == "link" and attributes["href"] == "data:,"
        ), f"<{tag}> can load something"
        for name in LOADING & attributes.keys():
            value = attributes[name] or ""
            assert value.startswith("#") or value == "data:,", f"<{tag} {name}={value!r}>"


def test_the_policy_allows_the_pages_own_scripts_and_nothing_else() -> None:
    html = page_of("rounds")
    policy = next(
        a["content"] for t, a in Elements(html).elements if a.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy is not None
    assert "default-src 'none'" in policy
    scripts = re.search(r"script-src ([^;]*)", policy)
    assert scripts is not None
    assert all(re.fullmatch(r"'sha256-[A-Za-z0-9+/]{43}='", source) for source in scripts[1].split())
    assert "unsafe-eval" not in policy


def test_markup_in_a_run_stays_text() -> None:
    html = page_of("hostile")
    page = Elements(html)
    assert not [tag for tag, attributes in page.elements if "onerror" in attributes]
    assert "onerror=alert" in "".join(page.text), "the string itself is shown"
    running = [
        s
        for (t, a), s in zip([e for e in page.elements if e[0] == "script"], page.scripts, strict=True)
        if not a
    ]
    assert len(running) == 1, "one script runs, and it is ours"
    assert "owned" not in running[0]
    assert "49" not in re.findall(r"<h1>(.*?)</h1>", html)[0], "{{7*7}} is not a template"


def test_every_chart_has_words_a_table_axis_names_and_data(any_page: str) -> None:
    html = any_page
    specs, data = embedded(html, "chart-specs"), embedded(html, "chart-data")
    page = Elements(html)
    plots = [a for _, a in page.elements if a.get("class") == "plot"]
    assert len(plots) == len(specs)
    for attributes in plots:
        assert len(attributes["aria-label"] or "") > 30
    assert html.count("The numbers of this chart") == len(specs)
    for name, spec in specs.items():
        assert axes(spec), name
        for axis in axes(spec):
            assert axis, f"an axis of {name} has no name"
        for wanted in data_names(spec) - set(spec.get("datasets", {})):
            columns = data[wanted]
            assert len({len(column) for column in columns.values()}) == 1
            assert fields(spec) & columns.keys()


def axes(spec: Any) -> list[str | None]:
    """Titles of all position axes; in a stack of lanes only the last must name the axis that they share."""
    lanes = spec.get("vconcat")
    if lanes:
        last = [lane["encoding"]["x"]["axis"]["title"] for lane in lanes[-1:]]
        return last + [lane["encoding"]["y"]["title"] for lane in lanes]
    collected: list[str | None] = []
    for layer in spec.get("layer", [spec]):
        collected += axes(layer) if "layer" in layer else []
        for channel in ("x", "y"):
            drawn = layer.get("encoding", {}).get(channel, {})
            if "title" in drawn or "title" in (drawn.get("axis") or {}):
                collected.append(drawn.get("title") or (drawn.get("axis") or {}).get("title"))
    return collected


def data_names(node: Any) -> set[str]:
    if isinstance(node, list):
        return set().union(*map(data_names, node)) if node else set()
    if not isinstance(node, dict):
        return set()
    named = {node["data"]["name"]} if isinstance(node.get("data"), dict) and "name" in node["data"] else set()
    return named.union(*map(data_names, node.values()))


def fields(node: Any) -> set[str]:
    if isinstance(node, list):
        return set().union(*map(fields, node)) if node else set()
    if not isinstance(node, dict):
        return set()
    named = {node["field"]} if isinstance(node.get("field"), str) else set()
    return named.union(*map(fields, node.values()))


def test_a_run_of_ten_thousand_steps_stays_under_three_megabytes(long_run: Run) -> None:
    assert len(long_run.tables["steps"]["t_s"]) >= 10_000
    assert len(page_of("open").encode()) <= 3_000_000


def test_thinning_keeps_every_extreme_and_says_so(long_run: Run) -> None:
    html = page_of("open")
    steps = embedded(html, "chart-data")["steps"]
    longest = float(long_run.tables["steps"]["step_us"].max()) / 1000
    assert max(steps["ms"]) == pytest.approx(longest, rel=1e-5)
    assert len(steps["ms"]) < len(long_run.tables["steps"]["t_s"])
    assert f"Of {len(long_run.tables['steps']['t_s']):,} steps" in html
    worst = float(long_run.tables["gc"]["pause_us"].max()) / 1000
    assert max(embedded(html, "chart-data")["gc"]["ms"]) == pytest.approx(worst, rel=1e-5)


def test_the_timeline_shows_every_eviction() -> None:
    from tests.golden.synthetic import evicting_run

    run = evicting_run()
    data = embedded(run_page(RunAnalysis(run)), "chart-data")
    assert sum(data["evicted"]["blocks"]) == run.tables["pool"]["evicted"].sum() > 0
    assert set(data["evicted"]["queue"]) == {"speculative", "probation"}


def test_a_timeline_without_evictions_says_why(rounds: Run) -> None:
    assert "Evictions were not recorded in this run." in page_of("rounds")
    quiet = Run(rounds.header, {**rounds.tables, "pool": empty_table("pool")})
    assert "No KV block was evicted" in run_page(RunAnalysis(quiet))


def test_a_gpus_use_is_told_with_the_memory(rounds: Run) -> None:
    devices = empty_table("devices")
    rows = {
        "t_s": [0.0, 0.2],
        "device": [0, 0],
        "busy_percent": [50, 100],
        "memory_bytes": [2**30, 3 * 2**30],
    }
    rows |= {"power_w": [300.0, 500.0], "clock_mhz": [1_980, 1_980]}
    filled = {name: np.array(rows.get(name, [0, 0]), column.dtype) for name, column in devices.items()}
    run = Run(rounds.header, {**rounds.tables, "devices": filled}).with_extra(devices=[f"Made GPU {HOSTILE}"])
    html = run_page(RunAnalysis(run))
    text = words(html)
    assert "<img src=x" not in html
    told = text[text.index("GPUs, sampled by NVML") :][:1500]
    assert re.search(r"Made GPU.*75 %.*3 GiB.*400 W.*1,980 MHz", told, re.DOTALL), told
    assert "GPUs, sampled by NVML" not in page_of("rounds")


def test_a_partial_run_says_so_before_any_number() -> None:
    html = page_of("partial")
    assert words(html).index("This run is partial.") < words(html).index("Measured")
    assert "was killed by signal 9" in html


def test_the_ladder_shows_what_the_load_and_the_pool_allow(rounds: Run) -> None:
    data = embedded(run_page(RunAnalysis(rounds, workload_of(rounds))), "chart-data")["ladder"]
    rates = dict(zip(data["rung"], data["rate"], strict=True))
    assert list(rates) == ["infinite cache", "offline optimum", "best known policy", "LRU", "this run"]
    assert rates["infinite cache"] >= rates["offline optimum"] >= rates["best known policy"] >= rates["LRU"]
    assert rates["infinite cache"] == pytest.approx(100 * 120_000 / 182_880, rel=1e-4)
    assert rates["this run"] == pytest.approx(100 * 60_000 / 182_880, rel=1e-4)


def test_a_load_that_was_not_served_whole_has_no_ladder() -> None:
    from tests.golden.synthetic import partial_run

    run = partial_run()
    assert "ladder" not in embedded(run_page(RunAnalysis(run, workload_of(run))), "chart-specs")


def test_a_failed_run_has_a_page_that_says_why() -> None:
    html = page_of("empty")
    assert "This run failed." in html
    assert "CUDA out of memory" in html
    assert "kvtune doctor" in words(html)


def test_a_prediction_is_marked_as_one() -> None:
    assert "Predicted, not measured." in page_of("sim")


def test_a_core_that_refused_is_named(rounds: Run) -> None:
    from tests.golden.synthetic import replace_header

    refused = replace_header(rounds, core=CoreInfo(name="kvtune", active=False, why="vLLM 0.33 is not known"))
    html = run_page(RunAnalysis(refused))
    assert "core was not active" in html
    assert "vLLM 0.33 is not known" in html


def test_missing_probes_leave_their_sections_out() -> None:
    html = page_of("bare")
    for gone in ('id="gc"', 'id="host"', 'id="memory"'):
        assert gone not in html
    for there in ('id="latency"', 'id="cache"', 'id="timeline"', 'id="environment"'):
        assert there in html


def test_every_id_on_a_page_is_unique_and_every_link_lands(any_page: str) -> None:
    page = Elements(any_page)
    ids = [a["id"] for _, a in page.elements if "id" in a]
    assert len(ids) == len(set(ids))
    for _, attributes in page.elements:
        target = attributes.get("href") or ""
        assert not target.startswith("#") or target[1:] in ids


def test_a_page_says_what_to_change_first() -> None:
    page = page_of("rounds")
    assert page.index("What to change") < page.index('id="verdict-command-1"')
    assert page.index('id="verdict-command-1"') < page.index('id="latency"')


def test_what_costs_most_comes_first_and_cheap_stalls_are_folded() -> None:
    def order(name: str) -> tuple[list[str], str]:
        page = run_page(RunAnalysis(read_run(FOLDER / f"schema1-{name}.kvrun")))
        return re.findall(r'<section id="([\w-]+)"', page), page

    real, page = order("real")
    assert real[:3] == ["verdict", "stalls", "latency"] and "The 5 worst, one by one" not in page
    chat, page = order("chat")
    assert chat[:3] == ["verdict", "host", "latency"] and chat.index("cache") < chat.index("stalls")
    assert "<details><summary>The 1 worst, one by one: in all stalls nobody worked" in page


def test_the_first_section_has_what_helps_with_gain_cost_and_command(rounds: Run) -> None:
    helps = Remedy(
        change="2x the pool", cost="1 GiB more", core="stock", flags={"seed": "1"}, gain_tokens=90_000
    )
    told = Replayed(query_tokens=182_880, hit_tokens=60_000, remedies=[helps, Remedy(change="a policy")])
    page = words(run_page(RunAnalysis(rounds.with_extra(replayed=told))))
    assert "2x the pool" in page and "+49.2 points of hits" in page and "1 GiB more" in page
    assert "--seed 1" in page and "Replayed too, and under a point: a policy." in page


def test_a_comparison_shows_both_sides_and_the_outcome(pair: tuple[Run, Run]) -> None:
    html = document_page(document(contrast(pair, ["a", "b"])))
    assert "kvtune against stock" in html
    assert 'class="short better"' in html
    specs = embedded(html, "chart-specs")
    assert {"points-1", "figures-1", "ttft", "rounds"} <= specs.keys()
    assert "prefix cache hit rate" in embedded(html, "chart-data")["points-1"]["of"]
    assert "pin_window" in html


def test_a_recordings_hours_are_said_in_words() -> None:
    log: dict[str, str | int | float] = {
        "path": "logs/day.jsonl",
        "since": 1795779268.002,
        "until": 1795779376.177,
    }
    load = WorkloadInfo(name="requests", spec="x", params=log, seed=0, hash="", requests=141)
    assert load_text(load) == "141 requests of day.jsonl, 11:34:28 to 11:36:16 UTC"
    whole = msgspec.structs.replace(load, params={**log, "since": 0.0, "until": 0.0})
    assert load_text(whole) == "141 requests of day.jsonl"


def test_three_runs_are_compared_with_the_first(pair: tuple[Run, Run]) -> None:
    html = document_page(document(contrast([*pair, pair[0]], ["a", "b", "c"])))
    assert {"figures-1", "figures-2"} <= embedded(html, "chart-specs").keys()


def test_identical_runs_show_no_difference(rounds: Run) -> None:
    compared = contrast([rounds, rounds], ["a", "b"])
    html = words(document_page(document(compared)))
    assert "no difference shown in any figure" in html
    assert 'class="short better"' not in html and 'class="short worse"' not in html


def test_incomparable_runs_are_drawn_with_a_warning(rounds: Run, long_run: Run) -> None:
    compared = contrast([rounds, long_run], ["a", "b"])
    assert compared.differences
    html = document_page(document(compared))
    assert "did not do the same work" in html
    assert "workload, checked" in html and 'differs"' in html


def test_a_page_goes_not_onto_a_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a folder"):
        write_new("one", tmp_path, force=True)


def test_times_that_are_missing_do_not_break_the_json(rounds: Run) -> None:
    requests = {**rounds.tables["requests"], "first_token_s": np.full(45, np.nan)}
    html = run_page(RunAnalysis(Run(rounds.header, {**rounds.tables, "requests": requests})))
    assert "NaN" not in json.dumps(embedded(html, "chart-data"))


def ours(html: str) -> Elements:
    """The page's elements; AssertionError where markup of a string became one of them."""
    page = Elements(html)
    assert not [tag for tag, attributes in page.elements if "onerror" in attributes]
    assert [tag for tag, _ in page.elements].count("title") == 1
    assert not {tag for tag, _ in page.elements} & {"img", "iframe", "object", "form"}
    running = [
        script
        for (_, attributes), script in zip(
            [each for each in page.elements if each[0] == "script"], page.scripts, strict=True
        )
        if not attributes
    ]
    assert len(running) == 1 and "owned" not in running[0]
    return page


def test_markup_in_stack_frames_stays_text(hostile: Run) -> None:
    top = [StackFunction(function=HOSTILE, file=HOSTILE, line=1, share=0.4)]
    boxes = [(0, 0.0, 1.0, HOSTILE, HOSTILE, 1), (1, 0.0, 0.5, f"</script>{HOSTILE}", HOSTILE, 2)]
    samples = StackSamples(file=HOSTILE, rate_hz=100, threads=HOSTILE, top=top, flame=boxes)
    run = hostile.with_extra(
        stacks={"engine_core": samples, "front_end": StackSamples(failed=HOSTILE)},
        devices=[HOSTILE],
        misses={HOSTILE: 3},
    )
    ours(run_page(RunAnalysis(run)))
    assert "flame" in run_page(RunAnalysis(run))


def test_markup_in_a_study_and_its_recipe_stays_text(tmp_path: Path) -> None:
    recipe = tmp_path / f"{HOSTILE.replace('/', '')[:60]}.toml"
    recipe.write_text(f"[recipe]\nmodel = '''{HOSTILE}</pre></script>'''\n")
    study = studies.tuned_study()
    bench = studies.bench(model=HOSTILE, spec=HOSTILE, vllm=HOSTILE, engine_args=[HOSTILE])
    trials = tuple(
        msgspec.structs.replace(
            trial,
            why=HOSTILE,
            run_file=HOSTILE,
            settings={**trial.settings, HOSTILE: HOSTILE},
            state="failed" if number == 3 else trial.state,
        )
        for number, trial in enumerate(study.trials)
    )
    for kind in ("tune", "sweep"):
        shown = view(studies.Study(kind, bench, trials), studies.HIT_RATE, recipe)
        html = study_page(shown)
        page = ours(html)
        assert "onerror=alert" in "".join(page.text), "the string itself is shown"
        assert "</pre></script>'''" not in html
