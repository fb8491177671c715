"""An explanation as lines of text and as JSON. Only formats, and computes shares."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict
from time import monotonic

import msgspec

from kvtune.analysis.again import Invocation, left_out, remedied
from kvtune.analysis.replayed import (
    Mend,
    brings,
    flags_only,
    helping,
    mends,
    more_tries,
    needs,
    points,
    tried,
    within_gap,
)
from kvtune.causes import CAUSES, cause_meaning
from kvtune.explain.explanation import Counts, Explanation, View
from kvtune.run.extras import Remedy, Replayed
from kvtune.sim.worker import Report
from kvtune.terminal import Column, FittedTable, folded
from kvtune.units import count, ms, percent

SHOWN_DISAGREEMENTS = 3
REPORT_EVERY_S = 10.0
WIDTH = 110


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


class Pasted(str):
    """A line with a command, which is not folded."""


def lines(explanation: Explanation, width: int = WIDTH) -> Iterator[str]:
    """Yield the explanation as lines of at most `width` columns, except commands."""
    for line in _long_lines(explanation, width):
        if isinstance(line, Pasted):
            yield line
        else:
            yield from folded(line, width)


def _long_lines(explanation: Explanation, width: int) -> Iterator[str]:
    query = explanation.query_tokens
    yield from _gap(explanation)
    yield f"{count(query)} prompt tokens of {count(explanation.requests)} requests"
    yield ""
    shown = [cause for cause, tokens in explanation.misses.items() if tokens]
    wide = max(15, *(len(cause) + 1 for cause in shown), 0)
    tier = explanation.tier_hit_tokens
    memory = f"  {percent(tier, query)} of host memory" if tier else ""
    yield f"  {'hit':<{wide}}{count(explanation.hit_tokens):>14}{percent(explanation.hit_tokens, query):>9}{memory}"
    for cause in sorted(shown, key=lambda cause: -explanation.misses[cause]):
        tokens = explanation.misses[cause]
        yield f"  {cause:<{wide}}{count(tokens):>14}{percent(tokens, query):>9}  {cause_meaning(cause)}"
    total = explanation.hit_tokens + sum(explanation.misses.values())
    yield f"  {'':<{wide}}{count(total):>14}{percent(total, query):>9}"
    if len(explanation.by_class) > 1:
        yield ""
        yield from _table("by class", explanation.by_class, width)
    if explanation.by_group:
        yield ""
        yield "by the KV cache group that caused it"
        for group, counts in explanation.by_group.items():
            causes = ", ".join(f"{cause} {count(tokens)}" for cause, tokens in counts.items() if tokens)
            yield f"  {group:<24} {causes}"
    if explanation.evictions:
        yield ""
        yield "evicted by"
        for eviction in explanation.evictions:
            age = f"median {ms(eviction.median_age_s * 1000)} before the miss, at most {ms(eviction.max_age_s * 1000)}"
            yield f"  {eviction.pressure:<32} {count(eviction.tokens):>12} tokens, {age}"
    if explanation.computed_twice:
        yield ""
        yield from _computed_twice(explanation.computed_twice)
    yield from _remedies(explanation)
    yield from _checks(explanation)


def _computed_twice(by_request: dict[str, Counts]) -> Iterator[str]:
    """Yield the tokens that preempted requests computed twice, by cause, and the request with the most."""
    total: Counts = {}
    for counts in by_request.values():
        for cause, tokens in counts.items():
            total[cause] = total.get(cause, 0) + tokens
    causes = ", ".join(f"{cause} {count(tokens)}" for cause, tokens in total.items())
    worst, most = max(by_request.items(), key=lambda one: sum(one[1].values()))
    whole = count(sum(total.values()))
    yield f"computed twice after preemptions of {count(len(by_request))} requests: {whole} tokens ({causes})"
    yield f"  the most: {worst}, {count(sum(most.values()))} tokens"


def _gap(explanation: Explanation) -> Iterator[str]:
    """Yield how far the replay is from the run: no gain below that is told."""
    query, ran = explanation.query_tokens, explanation.run_hit_tokens
    if ran is not None and (explanation.gap_tokens or explanation.disagreements or explanation.speed):
        run, replay = percent(ran, query), percent(explanation.hit_tokens, query)
        gap = percent(abs(explanation.gap_tokens), query).removesuffix(" %")
        yield f"{explanation.of} {run}, its replay {replay}: gap {gap} points"
    if explanation.speed:
        yield f"replayed {explanation.speed}"


def _table(title: str, rows: dict[str, Counts], width: int) -> list[str]:
    """Return a table of causes by class. A narrow terminal leaves out the smallest causes."""
    names = [cause for cause in CAUSES if cause in next(iter(rows.values()))]
    total = {cause: sum(row[cause] for row in rows.values()) for cause in names}
    causes = sorted((cause for cause in names if total[cause]), key=lambda cause: -total[cause])
    columns = [Column(title, folds=True, least=16), Column("tokens"), Column("hit")]
    columns += [Column(cause, rank=rank) for rank, cause in enumerate(causes)]
    cells = [
        (f"  {name}", count(row["query"]), *(percent(row[c], row["query"]) for c in ("hit", *causes)))
        for name, row in rows.items()
    ]
    return FittedTable(columns, cells).lines(width)


def _remedies(explanation: Explanation) -> Iterator[str]:
    """Yield the settings that help, one line about the others that were tried, and the other core in any case."""
    told = explanation.replayed
    if told.other is None:
        return
    yield ""
    all_tried, best, texts = tried(told), helping(told), mends(explanation.texts, told)
    stock = told.other.core == "kvtune"
    said = [(stock and not flags_only(one), -one.gain_tokens, _setting(one, explanation)) for one in best]
    said += [(False, -one.gain_tokens, [_mend(one, told)]) for one in texts]
    none = "none of the settings that were replayed helps"
    yield f"remedies, each replayed{'' if best else f'; {none}'}" if said else none
    for _, _, of_one in sorted(said, key=lambda one: one[:2]):
        yield from of_one
    if best and explanation.set_up is not None and (missing := left_out(explanation.set_up.flags)):
        yield f"  {missing}"
    if within := within_gap(told):
        gap = points(abs(told.gap_tokens), told.query_tokens).removeprefix("+")
        gain = "gains" if len(within) == 1 else "gain"
        yield f"  {len(within)} more {gain} less than the gap of {gap} between run and replay"
    if others := [one for one in all_tried if one not in best and not one.error and one not in within]:
        gains = (f"{one.change} ({points(one.gain_tokens, told.query_tokens)})" for one in others)
        yield f"  tried, each under a point: {'; '.join(gains)}"
    for one in all_tried:
        if one.error:
            yield f"  {'failed':>21}  {one.change}: {one.error}"
    if more := more_tries(told):
        yield f"  {more}"


def _setting(one: Remedy, explanation: Explanation) -> list[str]:
    """Return a remedy's lines: what it brings and takes, and the command that serves it."""
    told = explanation.replayed
    cause = f" (for {one.cause})" if one.cause else ""
    cost = f"; takes {one.cost}" if one.cost else ""
    hits = percent(one.hit_tokens, told.query_tokens)
    said = [f"  {brings(one, told):>21}  {one.change}: {hits} hit{cause}{cost}; {needs(one)}"]
    if explanation.set_up is not None:
        said.append(Pasted(f"{'':>23}  {remedied(explanation.set_up, one).serve(explanation.device)}"))
    return said


def _mend(one: Mend, told: Replayed) -> str:
    gain = f"{points(one.gain_tokens, told.query_tokens)} of hits"
    hits = percent(one.hit_tokens, told.query_tokens)
    return f"  {gain:>21}  mend the prompts, {one.what}: {hits} hit. {one.how}"


def _checks(explanation: Explanation) -> Iterator[str]:
    yield ""
    if explanation.run_hit_tokens is None:
        yield f"the {explanation.of} has no hits of each request, so the replay could not be checked against it"
    elif not explanation.disagreements:
        tokens = count(explanation.run_hit_tokens)
        yield f"checked: {explanation.of} and replay hit the same tokens in every request ({tokens} in all)"
    else:
        of = explanation.of
        yield (
            f"the replay differs from the {of} in {count(len(explanation.disagreements))} of "
            f"{count(explanation.requests)} requests: the {of} hit {count(explanation.run_hit_tokens)} tokens, "
            f"the replay {count(explanation.hit_tokens)} (the figures above explain the replay)"
        )
        if of == "log" and all(
            one.run_hit_tokens > one.replayed_hit_tokens == 0 for one in explanation.disagreements
        ):
            yield (
                "  in each of these the server hit and the replay did not: the server was warm when the log began, the "
                "replay begins with an empty cache"
            )
        for one in explanation.disagreements[:SHOWN_DISAGREEMENTS]:
            yield f"  {one.request}: {of} {count(one.run_hit_tokens)}, replay {count(one.replayed_hit_tokens)}"
    if explanation.not_admitted:
        requests = "request" if explanation.not_admitted == 1 else "requests"
        yield (
            f"left out: {count(explanation.not_admitted)} {requests} that the run or the replay sent, "
            "but did not look up in the cache"
        )
    yield from explanation.notes


def _commands(at: Invocation, one: Remedy, device: str) -> dict[str, str]:
    """Return the commands that measure a remedy and serve it."""
    changed = remedied(at, one)
    return {"command": changed.line("profile"), "serve": changed.serve(device)}


def to_json(explanation: Explanation) -> dict[str, object]:
    """Return the `--json` object; its `prefix_cache` has the fields of a run's summary."""
    fields = asdict(explanation)
    fields.pop("texts")  # the command adds them, without their text unless it is asked for
    fields["other"] = msgspec.to_builtins(explanation.other)
    at, device = fields.pop("set_up") and explanation.set_up, fields.pop("device")
    fields["remedies"] = [
        {**msgspec.to_builtins(one), "needs": needs(one), **(_commands(at, one, device) if at else {})}
        for one in explanation.remedies
    ]
    fields["disagreements"] = fields["disagreements"][:100]
    cache = {
        "query_tokens": fields.pop("query_tokens"),
        "hit_tokens": fields.pop("hit_tokens"),
        "hit_rate": explanation.hit_rate,
        "misses": fields.pop("misses"),
    }
    return {
        "schema": 1,
        "prefix_cache": cache,
        **fields,
        "gap_tokens": explanation.gap_tokens,
        "differing_requests": len(explanation.disagreements),
    }
