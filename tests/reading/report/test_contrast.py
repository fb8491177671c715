"""Which runs are sides, which are repetitions, and what a comparison says about them."""

from __future__ import annotations

import re
from html import unescape

import msgspec
from msgspec import structs

from kvtune.data.run.extras import Extras
from kvtune.data.run.types import CoreInfo, Run
from kvtune.data.show.markdown import markdown
from kvtune.data.show.page import document_page
from kvtune.reading.analysis.comparison.compare import average
from kvtune.reading.analysis.latency import ttft_ms
from kvtune.reading.report.comparison import document
from kvtune.reading.report.contrast import contrast, sentence
from tests.golden.synthetic import replace_header, rounds_run

KVTUNE = CoreInfo(name="kvtune", active=True, settings={"pin_window": 1024})


def stock(speed: float = 1.0) -> Run:
    return rounds_run(prefixes=4, prefix=800, speed=speed)


def kvtune(speed: float = 1.0) -> Run:
    return rounds_run(prefixes=4, prefix=800, speed=speed, hit_share=(0.0, 0.9, 0.9), core=KVTUNE)


def test_two_runs_are_two_sides() -> None:
    compared = contrast([stock(), kvtune()], ["a", "b"])
    assert [side.name for side in compared.sides] == ["stock", "kvtune"]
    assert not compared.repeated
    assert ("core pin_window", ("–", "1024")) in compared.differing


def test_interleaved_repetitions_are_two_sides_of_two_runs() -> None:
    compared = contrast([stock(), kvtune(1.01), stock(0.99), kvtune()], ["a1", "b1", "a2", "b2"])
    assert [(side.name, len(side.runs)) for side in compared.sides] == [("stock", 2), ("kvtune", 2)]
    assert compared.repeated
    throughput = next(f for f in compared.comparisons[0].figures if f.path == "throughput_tok_s")
    assert throughput.low is not None, "a figure of one value a run has an interval now"
    assert len(compared.sides[0].values(ttft_ms)) == 2 * 12
    assert "come from repeated runs (2 of stock, 2 of kvtune)" in document_page(document(compared))


def test_a_machine_that_drifts_more_than_the_settings_differ_shows_no_difference() -> None:
    compared = contrast([stock(0.5), kvtune(1.0), stock(1.5), kvtune(0.6)], ["a1", "b1", "a2", "b2"])
    itl = next(f for f in compared.comparisons[0].figures if f.path == "itl_ms.mean")
    assert itl.verdict == "no difference shown"


def test_one_repetition_without_its_like_makes_every_run_a_side() -> None:
    compared = contrast([stock(), kvtune(), stock()], ["a1", "b", "a2"])
    assert [len(side.runs) for side in compared.sides] == [1, 1, 1]
    assert len({side.name for side in compared.sides}) == 3


def test_runs_of_one_setting_are_compared_one_by_one() -> None:
    compared = contrast([stock(), stock()], ["same", "same"])
    assert [side.name for side in compared.sides] == ["same (1)", "same (2)"]
    assert compared.differing == ()
    judged = "no difference shown in any figure that is judged"
    assert sentence(compared.comparisons[0]) == f"{judged}; times not judged (one run a side)"
    assert not compared.repeat_command, "settings that are equal do not distinguish sides"


def test_a_sentence_names_one_figure_of_a_kind_and_counts_the_rest() -> None:
    sides = [
        replace_header(run, source="sim", extra=Extras(step_cost={"fitted": True}))
        for run in (stock(), kvtune())
    ]
    text = sentence(contrast(sides, ["a", "b"]).comparisons[0])
    assert text.startswith("better in time to first token, mean (-")
    assert text.count("time to first token") == 1
    assert "points)" in text, "a hit rate differs by points, not by percent of percent"


def test_one_measured_run_a_side_comes_with_the_line_that_repeats_both_in_turns() -> None:
    program, flags = "/opt/env/bin/kvtune", ["--", "--max-num-seqs", "8"]
    a = [program, "profile", "tiny-gemma3", "--core", "stock", "-o", "x", "--repeat=1", "--json", *flags]
    b = [program, "profile", "tiny-gemma3", "-w", "rounds:prefixes=2", "--output", "y y", *flags]
    made = [
        replace_header(run, command=words, engine=structs.replace(run.header.engine, args=flags[1:]))
        for run, words in ((stock(), a), (kvtune(), b))
    ]
    compared = contrast(made, ["a", "b"])
    load = "rounds:prefixes=4,prefix=800"
    line = (
        f"for run in 1 2 3; do kvtune profile tiny-gemma3 -w {load} --core stock -o ab/1 -- --max-num-seqs 8; "
        f"kvtune profile tiny-gemma3 -w {load} --set core.pin_window=1024 -o ab/2 -- --max-num-seqs 8; done; "
        "kvtune compare ab/1/*.kvrun ab/2/*.kvrun"
    )
    assert compared.repeat_command == line
    assert sentence(compared.comparisons[0]).endswith("times not judged (one run a side)")
    html = document_page(document(compared))
    (shown,) = re.findall(r'<pre id="repeat-command-1">(.*?)</pre>', html, re.S)
    assert " ".join(unescape(re.sub("<[^>]*>", "", shown)).split()) == line
    assert "not judged" in html and 'class="short worse"' not in html
    assert line in markdown(document(compared)).splitlines()
    tuned = [replace_header(run, command=["kvtune", "tune"]) for run in made]
    assert not contrast(tuned, ["a", "b"]).repeat_command
    again = contrast([*made, *made], ["a", "b", "a2", "b2"])
    assert again.times_judged and not again.repeat_command


def test_the_average_of_summaries_is_leaf_by_leaf() -> None:
    one = {"a": 1, "b": {"c": 2.0, "d": None}, "e": [1, 2], "name": "x", "flag": True}
    two = {"a": 2, "b": {"c": 4.0, "d": 5.0}, "e": [3, 4, 5], "name": "y", "flag": False}
    assert average([one, two]) == {
        "a": 1.5,
        "b": {"c": 3.0, "d": None},
        "e": [2.0, 3.0],
        "name": "x",
        "flag": True,
    }


def of_version(vllm: str) -> Run:
    run = stock()
    return replace_header(run, engine=msgspec.structs.replace(run.header.engine, vllm=vllm))


def test_runs_of_two_versions_of_vllm_are_two_sides_and_each_says_its_version() -> None:
    versions = ("0.32.0", "0.33.0", "0.32.0", "0.33.0")
    compared = contrast([of_version(v) for v in versions], ["a1", "b1", "a2", "b2"])
    assert [len(side.runs) for side in compared.sides] == [2, 2]
    first, second = (side.name for side in compared.sides)
    said = f"vllm differs: 0.32.0 in {first}, 0.33.0 in {second}"
    assert compared.differences == [said]
    assert said in markdown(document(compared))
    rows = re.sub(r"<[^>]+>", " ", document_page(document(compared)))
    assert re.search(r"vllm, checked\s+0\.32\.0\s+0\.33\.0", rows)
