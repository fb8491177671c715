"""The result of `kvtune evidence` on a terminal: one table per claim."""

from __future__ import annotations

from kvtune.analysis.claim_results import EvidenceResult
from kvtune.terminal import Column, FittedTable, console

COLUMNS = (
    Column("figure", folds=True, least=20),
    Column("ratio"),
    Column("95 %", rank=1),
    Column("published"),
    Column("verdict", right=False, folds=True),
)


def print_evidence(evidence: EvidenceResult) -> None:
    """Claims with their figures."""
    from rich.text import Text

    out = console()
    for claim in evidence["claims"]:
        rows: list[tuple[str, ...]] = []
        for row in claim["figures"]:
            interval = "–" if row["low"] is None else f"{row['low']:.3f} to {row['high']:.3f}"
            published = "–" if row["published"] is None else f"{row['published']:.2f}"
            shown = "–" if row["ratio"] is None else f"{row['ratio']:.3f}"
            rows.append((row["title"], shown, interval, published, row["verdict"]))
        out.print(Text(claim["title"], style="bold"))
        out.print(Text(f"published: {claim['published']}"))
        out.print(FittedTable(COLUMNS, rows, gap=2))
        for line in claim["why"]:
            out.print(Text(f"  {line}", style="dim"))
        out.print()
    out.print(Text(evidence["gpu"]))
