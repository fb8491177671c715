"""The table of `--ablate` for a terminal: each switch turned over, what that changes, and whether it is shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import IO, Any

from kvtune.analysis.ablation import FIGURES, Worth

TITLES = {
    "collections": "collections",
    "pause_ms": "pauses (ms)",
    "step_ms": "step (ms)",
    "host_us_per_request_step": "host µs per request and step",
    "rss_growth_bytes_s": "RSS growth (KiB/s)",
}
SCALES = {"rss_growth_bytes_s": 1024.0}


def print_ablation(
    found: Mapping[str, Sequence[Worth]], turned: Mapping[str, str], repeats: int, file: IO[str] | None = None
) -> None:
    """One row a variant; each cell the change, its 95 % interval, and a word where a difference is shown."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=file, highlight=False)
    if not console.is_terminal:
        console = Console(file=file, highlight=False, width=160)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("turned over")
    for figure in FIGURES:
        table.add_column(TITLES[figure], justify="right")
    first = next(iter(found.values()), ())
    table.add_row("baseline", *(_number(w.baseline, w.figure) for w in first))
    for name, worths in found.items():
        table.add_row(Text(f"{name} {turned.get(name, '')}"), *(Text(_cell(w)) for w in worths))
    console.print(table)
    console.print(
        f"{repeats} runs each, interleaved. A cell is the change against the baseline and its 95 % interval; "
        "= means no difference shown."
    )


def plain(found: Mapping[str, Sequence[Worth]]) -> dict[str, Any]:
    """For `--json`."""
    from dataclasses import asdict

    return {name: [asdict(w) for w in worths] for name, worths in found.items()}


def _cell(worth: Worth) -> str:
    if worth.difference is None:
        return "–"
    change = _number(worth.difference, worth.figure, sign="+")
    if worth.low is None or worth.high is None:
        return f"{change} (one run)"
    between = f"[{_number(worth.low, worth.figure)}, {_number(worth.high, worth.figure)}]"
    return f"{change} {between} {'=' if worth.verdict == 'no difference shown' else worth.verdict}"


def _number(value: float | None, figure: str, sign: str = "") -> str:
    if value is None:
        return "–"
    scaled = value / SCALES.get(figure, 1.0)
    digits = 0 if abs(scaled) >= 100 else 1 if abs(scaled) >= 10 else 2
    return f"{scaled:{sign},.{digits}f}"
