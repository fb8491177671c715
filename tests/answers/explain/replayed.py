"""A run, explained as the command does it."""

from __future__ import annotations

from typing import Any

from kvtune.answers.explain.explanation import Explanation, bench_of, explained
from kvtune.data.run.types import Run
from tests.simulator import SHARED


def explain(run: Run, *, tries: int = 4, **more: Any) -> Explanation:
    with bench_of(run, **{"lab": SHARED, **more}) as bench:
        return explained(bench, tries)
