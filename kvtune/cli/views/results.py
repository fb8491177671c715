"""Prints the result of `kvtune profile`: JSON on stdout, or a summary and the path of the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvtune.data.show.terminal import print_json
from kvtune.lab.engine.profile import Profiled
from kvtune.requests.types import Workload

if TYPE_CHECKING:
    from kvtune.lab.sim.simulators import Simulators
    from kvtune.reading.analysis.run import RunAnalysis


@dataclass(frozen=True, slots=True)
class Shown:
    """The user's options for showing a run. `tries`: how many other settings to replay at most."""

    tries: int
    as_json: bool
    opened: bool = False
    verbose: bool = False


def show(done: Sequence[Profiled], workload: Workload, shown: Shown, simulators: Simulators | None) -> None:
    """Replay the run with other settings, write each run's page, print the run, open its page if asked.

    Of several runs, replay and print the one with the median throughput; JSON also lists all of them in `repeats`.
    """
    from kvtune.base.files import write_new
    from kvtune.data.show.page import document_page
    from kvtune.data.show.screen import print_document
    from kvtune.reading.analysis.run import RunAnalysis
    from kvtune.reading.analysis.summary import summary
    from kvtune.reading.report.run import document, first_screen

    runs = [(result.path, RunAnalysis(result.run, workload, str(result.path))) for result in done]
    runs.sort(key=lambda run: run[1].latency.throughput_tok_s or 0.0)
    median = (len(runs) - 1) // 2
    interrupted: KeyboardInterrupt | None = None
    if shown.tries and simulators is not None:
        try:
            runs[median] = (runs[median][0], _advised(*runs[median], shown.tries, simulators))
        except KeyboardInterrupt as interrupt:  # the run itself is complete: show it
            interrupted = interrupt
    pages, facts, answers = [], [], []
    for path, analysis in runs:
        answers.append(document(analysis))
        html = document_page(answers[-1])
        pages.append(write_new(html, path.with_suffix(".html"), private=analysis.run.private))
        facts.append(summary(analysis) | {"run_file": str(path), "page": str(pages[-1])})
    if shown.as_json:
        repeats = [{k: f[k] for k in ("run_file", "throughput_tok_s", "ttft_ms", "itl_ms")} for f in facts]
        print_json({**facts[median], "repeats": repeats} if len(facts) > 1 else facts[median])
    else:
        print_document(answers[median] if shown.verbose else first_screen(answers[median]))
        print(f"run file  {runs[median][0]}")
        print(f"page      {pages[median]}")
    if interrupted is not None:
        raise interrupted
    if shown.opened:
        from kvtune.cli.views.answer import open_page

        open_page(pages[median])


def _advised(path: Path, analysis: RunAnalysis, tries: int, simulators: Simulators) -> RunAnalysis:
    """Replay the run with other settings, and store the results in its file and in the analysis that is returned."""
    from kvtune.answers.explain.explanation import advised
    from kvtune.cli.views.progress import ProgressView, Replays
    from kvtune.data.run.file import store_extra
    from kvtune.reading.analysis.run import RunAnalysis

    assert analysis.workload is not None
    with ProgressView(len(analysis.workload.requests), analysis.run.header.model) as view:
        run = advised(simulators, analysis, analysis.workload, tries, Replays(view))
    store_extra(path, misses=run.header.extra.misses, replayed=run.header.extra.replayed)
    return RunAnalysis(run, analysis.workload, str(path))
