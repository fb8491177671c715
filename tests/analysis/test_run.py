"""One analysis a run: whatever the console, the page and the JSON show, each result is computed once."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import kvtune.analysis
from kvtune.analysis.cache import prefix_cache
from kvtune.analysis.rebuild import workload_of
from kvtune.analysis.run import RunAnalysis
from kvtune.analysis.summary import summary
from kvtune.cli.views import results
from kvtune.engine.profile import Profiled
from kvtune.run.file import read_run
from kvtune.run.types import Run
from tests.golden.make import FOLDER
from tests.golden.synthetic import rounds_run

PACKAGE = str(Path(kvtune.analysis.__file__).parent)

LOOKUPS = {
    "_place",
    "process_keys",
    "match_unit",
    "_ended",
    "_queries",
    "_joined",
    "_advice",
    "tune_line",
    "beside",
    "left_out_of_run",
    "profile_line",
    "of_run",
    "named",
    "_own_words",
    "with_remedy",
    "workload_words",
}
LOOKUPS |= {"_stall", "evidence", "collected", "cpu_waits", "_made_and_taken_s"}
"""Helpers of several results: lookups, the words of a command, what is told of one stall or of some processes."""


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Calls of functions of kvtune.analysis that take a run, by name."""
    calls: Counter[str] = Counter()

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGE) or not code.co_argcount:
            return
        if isinstance(frame.f_locals.get(code.co_varnames[0]), Run):
            calls[code.co_name] += 1

    sys.setprofile(profile)
    try:
        yield calls
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("as_json", [True, False], ids=["json", "console"])
def test_profile_computes_nothing_twice(
    as_json: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What `kvtune profile` shows at its end: the page, and the JSON or the console's summary."""
    run = read_run(FOLDER / "schema1-real.kvrun")
    workload = workload_of(run)
    assert workload is not None
    with counted() as calls:
        shown = results.Shown(tries=0, as_json=as_json)
        results.show([Profiled(run, tmp_path / "a.kvrun", None)], workload, shown, None)
    assert capsys.readouterr().out and (tmp_path / "a.html").exists()
    assert calls["prefix_cache"] == calls["latency"] == calls["verdict"] == calls["collectors"] == 1
    assert {name: n for name, n in calls.items() if n > 1 and name not in LOOKUPS} == {}


def test_the_count_knows_what_is_computed_twice() -> None:
    run = rounds_run(prefixes=2)
    with counted() as calls:
        prefix_cache(run, None)
        prefix_cache(run, None)
    assert calls["prefix_cache"] == 2


RESULTS = [name for name, value in vars(RunAnalysis).items() if isinstance(value, cached_property)]


def test_the_order_of_reading_changes_no_result() -> None:
    run = read_run(FOLDER / "schema1-rounds.kvrun")
    workload = workload_of(run)
    backwards = RunAnalysis(run, workload)
    for name in reversed(RESULTS):
        getattr(backwards, name)
    assert summary(backwards) == summary(RunAnalysis(run, workload))
