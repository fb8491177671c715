"""An explanation as lines of text and as JSON. Computes nothing but shares."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict
from time import monotonic
from typing import Any

from kvtune.explain.explanation import Counts, Explanation, View
from kvtune.sim.verdicts.causes import CAUSES, MEANING
from kvtune.sim.worker import Report
from kvtune.units import count, ms, percent

SHOWN_DISAGREEMENTS = 3
REPORT_EVERY_S = 10.0


class ConsoleView(View):
    """Prints each phase on standard error, and a replay's progress every ten seconds."""

    def __init__(self) -> None:
        self._last = monotonic()

    def phase(self, text: str) -> None:
        print(f"{text} ..", file=sys.stderr)

    def progress(self, report: Report) -> None:
        if monotonic() - self._last < REPORT_EVERY_S or not report.finished:
            return
        self._last = monotonic()
        left_s = report.elapsed_s * (report.requests / report.finished - 1)
        print(
            f"  {count(report.finished)} of {count(report.requests)} requests, about {left_s:.0f} s left",
            file=sys.stderr,
        )


def lines(found: Explanation) -> Iterator[str]:
    query = found.query_tokens
    yield f"{count(query)} prompt tokens of {count(found.requests)} requests"
    yield ""
    yield f"  {'hit':<15}{count(found.hit_tokens):>14}{percent(found.hit_tokens, query):>9}"
    for cause in sorted(CAUSES, key=lambda cause: -found.misses[cause]):
        tokens = found.misses[cause]
        if tokens:
            yield f"  {cause:<15}{count(tokens):>14}{percent(tokens, query):>9}  {MEANING[cause]}"
    total = found.hit_tokens + sum(found.misses.values())
    yield f"  {'':<15}{count(total):>14}{percent(total, query):>9}"
    if len(found.by_class) > 1:
        yield from _table("by class", found.by_class)
    if found.by_group:
        yield ""
        yield "by the KV cache group that caused it"
        for group, counts in found.by_group.items():
            causes = ", ".join(f"{cause} {count(tokens)}" for cause, tokens in counts.items() if tokens)
            yield f"  {group:<24} {causes}"
    if found.evictions:
        yield ""
        yield "evicted by"
        for eviction in found.evictions:
            age = f"median {ms(eviction.median_age_s * 1000)} before the miss, at most {ms(eviction.max_age_s * 1000)}"
            yield f"  {eviction.pressure:<32} {count(eviction.tokens):>12} tokens, {age}"
    yield from _remedies(found)
    yield from _checks(found)


def _table(title: str, rows: dict[str, Counts]) -> Iterator[str]:
    shown = ["hit", *(cause for cause in CAUSES if any(row[cause] for row in rows.values()))]
    yield ""
    yield f"{title:<24}{'tokens':>12}" + "".join(f"{name:>15}" for name in shown)
    for name, row in rows.items():
        yield f"  {name:<22}{count(row['query']):>12}" + "".join(
            f"{percent(row[column], row['query']):>15}" for column in shown
        )


def _remedies(found: Explanation) -> Iterator[str]:
    if not found.remedies:
        return
    yield ""
    yield "remedies, each replayed"
    query = found.query_tokens
    for remedy in found.remedies:
        if remedy.error:
            yield f"  {'failed':>9}  {remedy.change}: {remedy.error}"
            continue
        points = 100 * remedy.gain_tokens / query if query else 0.0
        after = percent(remedy.hit_tokens, query)
        yield f"  {points:>+7.1f} %  {remedy.change}: {after} hit (for {remedy.cause})"


def _checks(found: Explanation) -> Iterator[str]:
    yield ""
    if found.run_hit_tokens is None:
        yield "the run did not record hits per request, so the replay could not be checked against it"
    elif not found.disagreements:
        yield f"checked: run and replay hit the same tokens in every request ({count(found.run_hit_tokens)} in all)"
    else:
        yield (
            f"the replay differs from the run in {count(len(found.disagreements))} of {count(found.requests)} "
            f"requests: the run hit {count(found.run_hit_tokens)} tokens, the replay {count(found.hit_tokens)} "
            "(the figures above explain the replay)"
        )
        for one in found.disagreements[:SHOWN_DISAGREEMENTS]:
            yield f"  {one.request}: run {count(one.run_hit_tokens)}, replay {count(one.replayed_hit_tokens)}"
    if found.not_admitted:
        yield f"{count(found.not_admitted)} requests were never admitted and are left out"
    yield from found.notes


def to_json(found: Explanation) -> dict[str, Any]:
    """The `--json` object; `prefix_cache` as in a run's summary."""
    fields = asdict(found)
    fields["disagreements"] = fields["disagreements"][:100]
    cache = {
        "query_tokens": fields.pop("query_tokens"),
        "hit_tokens": fields.pop("hit_tokens"),
        "hit_rate": found.hit_rate,
        "misses": fields.pop("misses"),
    }
    return {"schema": 1, "prefix_cache": cache, **fields, "differing_requests": len(found.disagreements)}
