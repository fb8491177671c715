"""Prints the result of `kvtune profile`: JSON on stdout, or a summary and the path of the page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvtune.engine.profile import Profiled
from kvtune.workload.types import Workload


def show(done: Sequence[Profiled], workload: Workload, *, as_json: bool, opened: bool = False) -> None:
    """Write each run's page, print the run, open its page if `opened`.

    Of several runs it is the one of median throughput, with all in `repeats`.
    """
    from kvtune.analysis.run import RunAnalysis
    from kvtune.analysis.summary import summary
    from kvtune.report.files import write_new
    from kvtune.report.pages.run import run_page

    repeated: list[tuple[float, dict[str, Any], Profiled, Path]] = []
    for result in done:
        analysis = RunAnalysis(result.run, workload)
        facts = summary(analysis)
        page = write_new(run_page(analysis), result.path.with_suffix(".html"))
        facts["run_file"], facts["page"] = str(result.path), str(page)
        repeated.append((float(facts["throughput_tok_s"] or 0.0), facts, result, page))
    _, facts, result, page = sorted(repeated, key=lambda f: f[0])[(len(repeated) - 1) // 2]
    if as_json:
        repeats = [
            {k: f[k] for k in ("run_file", "throughput_tok_s", "ttft_ms", "itl_ms")}
            for _, f, _, _ in repeated
        ]
        print(json.dumps({**facts, "repeats": repeats} if len(repeated) > 1 else facts))
    else:
        from kvtune.report.console.summary import print_summary

        print_summary(facts)
        print(f"run file  {result.path}")
        print(f"page      {page}")
    if opened:
        from kvtune.cli.views.browser import open_page

        open_page(page)
