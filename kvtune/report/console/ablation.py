"""The table of `--ablate` for a terminal: what toggling each switch changes, and whether that is more than chance."""

from __future__ import annotations

from typing import IO

from kvtune.analysis.comparison.ablation import FIGURES, Ablation
from kvtune.analysis.comparison.compare import Figure
from kvtune.analysis.knobs import knob_lines
from kvtune.core.settings import KNOBS
from kvtune.terminal import Column, FittedTable, console

TITLES = {
    "collections": "collections",
    "pause_ms": "pauses (ms)",
    "step_ms": "step (ms)",
    "host_us_per_request_step": "host µs per request and step",
    "ceiling_us_per_token": "host ceiling (µs per token)",
    "rss_growth_bytes_s": "RSS growth (KiB/s)",
}
SCALES = {"rss_growth_bytes_s": 1024.0}


def print_ablation(ablation: Ablation, file: IO[str] | None = None) -> None:
    """One row per variant; each cell holds the change, its 95 % interval and the verdict."""
    from rich.text import Text

    out = console(190, file=file)
    columns = [Column("toggled", folds=True), Column("runs", rank=len(FIGURES))]
    columns += [Column(TITLES[figure], folds=True, least=16, rank=at) for at, figure in enumerate(FIGURES)]
    means = (_number(worth.a, worth.path) for worth in ablation.turned[0].worths)
    rows = [["baseline", str(len(ablation.baseline.runs)), *means]]
    for side in ablation.turned:
        cells = (_cell(worth) for worth in side.worths)
        rows.append([f"{side.name} {side.turned}", str(len(side.runs)), *cells])
    out.print(FittedTable(columns, rows, gap=2))
    out.print(
        "Each cell is the change against the baseline and its 95 % interval over whole, interleaved runs. "
        "Less is better in every column; = means no difference shown."
    )
    for line in knob_lines(side.name for side in ablation.turned if side.name in KNOBS):
        out.print(Text(line, style="dim"))
    if ablation.why:
        out.print(Text(f"{ablation.done} of {ablation.planned} runs: {ablation.why}."))
    for side in (ablation.baseline, *ablation.turned):
        for why in side.failed:
            out.print(Text(f"failed  {side.name}: {why}"))


def _cell(worth: Figure) -> str:
    if worth.difference is None:
        return "–"
    change = _number(worth.difference, worth.path, sign="+")
    if worth.low is None or worth.high is None:
        return f"{change} (too few runs)"
    between = f"[{_number(worth.low, worth.path)}, {_number(worth.high, worth.path)}]"
    return f"{change} {between} {'=' if worth.verdict == 'no difference shown' else worth.verdict}"


def _number(value: float | None, figure: str, sign: str = "") -> str:
    if value is None:
        return "–"
    scaled = value / SCALES.get(figure, 1.0)
    digits = 0 if abs(scaled) >= 100 else 1 if abs(scaled) >= 10 else 2
    return f"{scaled:{sign},.{digits}f}"
