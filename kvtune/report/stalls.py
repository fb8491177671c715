"""Slow tokens in words: from the account's `--json` objects to one line a stall and to tables. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvtune.analysis.stalls.causes import ADVICE, CAUSES
from kvtune.analysis.stalls.sides import side_stalls
from kvtune.report.names import process_title, source_line
from kvtune.units import count, ms, percent

LEAST_SHOWN = 0.0005


def lead(account: Mapping[str, Any]) -> str:
    """A sentence on how many gaps were slow; empty if no gap was."""
    if not account.get("slow"):
        return ""
    slow, stalls = account["slow"], account["stalls"]
    were, noun = "was" if slow == 1 else "were", "stall" if stalls == 1 else "stalls"
    return (
        f"{count(slow)} of {count(account['gaps'])} gaps between deliveries of tokens {were} over "
        f"{ms(account['limit_ms'])} (twice their median), in {count(stalls)} {noun}: "
        f"{ms(account['excess_ms'])} above the median in total."
    )


def advice(account: Mapping[str, Any]) -> str:
    """The cause of most of the time, and what can be tried."""
    largest = next(iter(account["causes"]))
    return f"Most of the time: {CAUSES[largest]}. {ADVICE[largest]}"


def cause_rows(account: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """By cause: title, number of gaps with it as largest part, its time, its share. Shares that read 0 are left out."""
    return [
        (CAUSES.get(cause, cause), count(own["gaps"]), ms(own["excess_ms"]), percent(own["share"], 1))
        for cause, own in account["causes"].items()
        if own["share"] >= LEAST_SHOWN
    ]


def side_by_side(sides: Sequence[Sequence[Mapping[str, Any]]]) -> list[tuple[str, ...]]:
    """Rows of a comparison: a title, then a text for each side; empty where no side has a slow token.

    A side is the `--json` objects of its runs: their mean is shown.
    """
    found = [side_stalls([summary["stalls"] for summary in summaries]) for summaries in sides]
    known = [side for side in found if side is not None]
    if not any(side.slow for side in known):
        return []
    rows = [
        ("a gap is slow over", *("–" if side is None else ms(side.limit_ms) for side in found)),
        (
            "all slow gaps",
            *(
                "–" if side is None else _side_text(side.slow, side.excess_ms, side.excess_ms)
                for side in found
            ),
        ),
    ]
    largest = {cause: max(side.causes.get(cause, (0.0, 0.0))[1] for side in known) for cause in CAUSES}
    for cause in sorted(CAUSES, key=lambda cause: -largest[cause]):
        own = [side and (*side.causes.get(cause, (0.0, 0.0)), side.excess_ms) for side in found]
        if any(cell and cell[2] and cell[1] / cell[2] >= LEAST_SHOWN for cell in own):
            rows.append((CAUSES[cause], *(_side_text(*cell) if cell else "–" for cell in own)))
    return rows


def _side_text(gaps: float, part_ms: float, excess_ms: float) -> str:
    """`12 gaps, 840 ms (34.5 %)`: number of gaps with this largest cause, its time, its share of the side's excess."""
    noun = "gap" if gaps == 1 else "gaps"
    return f"{gaps:,.4g} {noun}, {ms(part_ms)} ({percent(part_ms, excess_ms)})"


def why(stall: Mapping[str, Any]) -> str:
    """The cause of one stall, with what the record says about it."""
    cause, found = str(stall["cause"]), stall["evidence"]
    title = CAUSES.get(cause, cause)
    if cause == "prefill" and found["requests"]:
        named = ", ".join(found["requests"])
        more = found["prefilling"] - len(found["requests"])
        tokens = count(found["prompt_tokens"])
        return f"{title}: {named}{f' and {more} more' if more > 0 else ''} ({tokens} prompt tokens)"
    if cause == "collection" and found["pause_ms"] is not None:
        file, _, line = found["line"].rpartition(":")
        where = f", set off at {source_line(file, int(line))}" if line.isdigit() else ""
        pause = f"generation {found['generation']}, {ms(found['pause_ms'])}"
        return f"{title} in {process_title(found['process'])}: {pause}{where}"
    if cause == "off_cpu" and found["process"]:
        how = "a signal had stopped it" if found["stopped"] else "it waited for one"
        return f"{title}: {process_title(found['process'])}, {how}"
    if cause in ("device", "batch") and found["step_ms"] is not None:
        return f"{title}: {ms(found['step_ms'])}, its work takes {ms(found['fitted_ms'])}"
    return title
