"""The pages that the browser tests open, and what they do with a window."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from kvtune.data.run.file import read_run
from kvtune.data.run.types import CoreInfo
from kvtune.data.show.page import document_page
from kvtune.reading.analysis.run import RunAnalysis
from kvtune.reading.report.comparison import document
from kvtune.reading.report.contrast import contrast
from tests.golden import studies
from tests.golden.make import FOLDER
from tests.golden.synthetic import empty_run, partial_run, rounds_run
from tests.reading.report.drawn import run_of, run_page, study_page
from tests.reading.report.test_stacks import with_stacks

Open = Callable[..., Any]

MAKERS: dict[str, Callable[[], str]] = {
    "run": lambda: run_page(RunAnalysis(with_stacks())),
    "long": lambda: run_page(RunAnalysis(run_of("open"))),
    "evictions": lambda: run_page(RunAnalysis(run_of("evictions"))),
    "partial": lambda: run_page(RunAnalysis(partial_run())),
    "empty": lambda: run_page(RunAnalysis(empty_run())),
    "hostile": lambda: run_page(RunAnalysis(run_of("hostile"))),
    "compare": lambda: _compared(),
    "sweep": lambda: study_page(studies.viewed(studies.grid_study())),
    "tune": lambda: study_page(studies.viewed(studies.tuned_study())),
    "thousand": lambda: study_page(studies.viewed(studies.thousand())),
    "real": lambda: run_page(RunAnalysis(read_run(FOLDER / "schema1-real.kvrun"))),
    "folded": lambda: run_page(RunAnalysis(read_run(FOLDER / "schema1-chat.kvrun"))),
}


def _compared() -> str:
    kvtune = rounds_run(hit_share=(0.0, 0.98, 0.98), core=CoreInfo(name="kvtune", active=True))
    return document_page(document(contrast([run_of("rounds"), kvtune], ["a", "b"])))


def size(page: Any, width: int) -> None:
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def scheme(page: Any, preference: str, media: str = "") -> None:
    features = [{"name": "prefers-color-scheme", "value": preference}]
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": features})


def wait(done: Callable[[], Any], seconds: float = 40) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if result := done():
            return result
        time.sleep(0.05)
    raise AssertionError(f"not within {seconds} s")
