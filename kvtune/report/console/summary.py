"""A run on a terminal: one screen, or every section's tables. Plain text where there is no terminal.

Styles never carry meaning alone, so that NO_COLOR and pipes lose nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, TYPE_CHECKING

from kvtune.analysis.again import with_remedy
from kvtune.analysis.replayed import beside, brings, helping, needs
from kvtune.analysis.run import RunAnalysis
from kvtune.report.banners import banners
from kvtune.report.sections import run_sections
from kvtune.report.sections.verdict import tiles
from kvtune.show.parts import Grid, Section
from kvtune.terminal import command, console
from kvtune.units import count

if TYPE_CHECKING:
    from rich.console import RenderableType

PIPE_WIDTH = 110  # columns where there is no terminal
SHOWN_REMEDIES = 2
"""Remedies shown besides the best one, which the verdict names."""
PLACES = {"sim": " (predicted by the simulator)", "host": " (no model: a simulated device)"}


def print_summary(analysis: RunAnalysis, file: IO[str] | None = None, *, first_screen: bool = False) -> None:
    """Print the summary or its first screen. Coloured on a terminal unless NO_COLOR is set."""
    view = screen_view(analysis) if first_screen else summary_view(analysis)
    console(PIPE_WIDTH, file=file).print(view, crop=False)


def screen_view(analysis: RunAnalysis) -> RenderableType:
    """Return the first screen of 24 lines: the run, its main figures, what limits it, what to try."""
    from rich.console import Group

    return Group(*_begin(analysis), *_verdict(analysis))


def summary_view(analysis: RunAnalysis) -> RenderableType:
    """Return the whole summary as one rich renderable."""
    from rich.console import Group

    tables = (part for section in run_sections(analysis) for part in section_view(section))
    return Group(*_begin(analysis), *tables, *_verdict(analysis))


def section_view(section: Section) -> Iterator[RenderableType]:
    """Yield a section's tables and paragraphs, each after an empty line."""
    from rich.padding import Padding
    from rich.text import Text

    for part in section.terminal:
        if not isinstance(part, Grid):
            yield Padding(Text(part), (1, 0, 0, 0))
        elif part.rows:
            yield Padding(part.fitted(), (1, 0, 0, 0))


def _begin(analysis: RunAnalysis) -> Iterator[RenderableType]:
    from rich.text import Text

    h = analysis.run.header
    yield Text(beside(analysis.run), style="bold")
    head = Text()
    head.append(f"{h.model}{PLACES.get(h.source, '')}", style="bold")
    head.append(f"  {h.workload.spec or h.workload.name}\n")
    where = (
        f"{count(analysis.latency.requests)} requests",
        f"vLLM {h.engine.vllm}" if h.engine.vllm else "",
        h.engine.device,
        h.engine.pool,
    )
    yield head.append(", ".join(filter(None, where)), style="dim")
    for banner in banners(analysis.run):
        if banner.css != "info":
            yield Text(f"! {banner.title} {banner.text}", style="yellow")
        for line in banner.lines:
            yield Text(f"! Note: {line}", style="yellow")
    figures = Text()
    for tile in tiles(analysis):
        figures.append(f"\n  {tile.name.lower():<16}", style="dim").append(f"{tile.value} {tile.more}")
    yield figures


def _verdict(analysis: RunAnalysis) -> Iterator[RenderableType]:
    from rich.text import Text

    verdict, run = analysis.verdict, analysis.run
    yield Text()
    yield Text.assemble((f"{verdict.limit} ", "bold"), verdict.advice)
    yield command(f"  {verdict.command}", "cyan")
    if verdict.without:
        yield Text(f"  {verdict.without}", style="dim")
    if verdict.also:
        yield Text(f"Also: {verdict.also}.")
    if told := run.header.extra.replayed:
        others = [one for one in helping(told) if with_remedy(run, one) != verdict.command]
        for one in others[:SHOWN_REMEDIES]:
            yield Text(f"  {brings(one, told)}: {one.change} ({needs(one)})")
