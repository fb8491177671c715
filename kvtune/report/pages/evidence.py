"""The page of `kvtune evidence`: each published claim, its figures on this machine, and the commands to repeat them.

Drawn from the object that `kvtune evidence` writes as JSON.
"""

from __future__ import annotations

from kvtune.analysis.claim_results import IDENTITY, ClaimResult, EvidenceResult
from kvtune.report.banners import Banner
from kvtune.report.charts import Cell, Section, grid

HEADS = ("figure", "work", "ratio", "95 % interval", "published", "runs", "verdict")
TONE = {"holds": "better", "does not hold here": "worse"}


def evidence_page(evidence: EvidenceResult) -> str:
    """One self-contained HTML file."""
    from kvtune.report.pages.frame import render

    machine = evidence["machine"]
    return render(
        IDENTITY,
        title="Evidence · kvtune",
        eyebrow="kvtune evidence",
        heading="The published results, measured again",
        subtitle=(
            f"vLLM {machine['vllm']}, {machine['cpu']} ({machine['cores']} cores), "
            f"{machine['device'] or 'no engine run'}, Python {machine['python']}, "
            f"kvtune {machine['kvtune']}, {evidence['made_at']}"
        ),
        sections=[*(_claim(claim) for claim in evidence["claims"]), _how(evidence)],
        banners=[Banner("info", "Scaled.", evidence["scale"]), Banner("info", "GPU.", evidence["gpu"])],
    )


def _claim(claim: ClaimResult) -> Section:
    rows = [
        (
            row["title"],
            row["work"],
            "–" if row["ratio"] is None else Cell(f"{row['ratio']:.3f}", row["ratio"]),
            "–" if row["low"] is None else f"{row['low']:.3f} to {row['high']:.3f}",
            "–" if row["published"] is None else Cell(f"{row['published']:.2f}", row["published"]),
            Cell(str(row["runs"]), row["runs"]),
            Cell(row["verdict"], None, TONE.get(row["verdict"], "")),
        )
        for row in claim["figures"]
    ]
    commands = list(dict.fromkeys(line for row in claim["figures"] for line in row["commands"]))
    return Section(
        claim["name"],
        claim["title"],
        f"Published: {claim['published']}. {claim['verdict']}",
        "figures.html",
        {
            "tables": [grid(HEADS, rows, "A ratio is the second side's figure over the first's")]
            if rows
            else [],
            "why": [*claim["why"], *commands],
        },
    )


def _how(evidence: EvidenceResult) -> Section:
    lines = (
        "Every ratio compares runs of one call; the sides take turns, in reverse order every second time.",
        "Intervals are Welch's at 95 %, on logarithms of whole runs (block pool alone: of repeats in one process).",
        "holds: the interval is on the claim's side of 1 and at least half of what was published is reached; "
        "smaller here: less than half of it; no difference shown: the interval contains 1.",
        f"{evidence['runs']} engine runs, {evidence['wall_s'] / 60:.0f} minutes in the last call. "
        f"To repeat all of it: {evidence['command']}",
    )
    return Section("how", "How it was measured", "", "figures.html", {"tables": [], "why": list(lines)})
