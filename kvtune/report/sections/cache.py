"""The prefix cache: prompt tokens that hit, that missed by cause, and hits per round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvtune.analysis.cache import PrefixCache, Round
from kvtune.analysis.run import RunAnalysis
from kvtune.analysis.verdict import winnable
from kvtune.causes import CAUSES, UNCLASSIFIED, WINNABLE, cause_meaning, cause_title
from kvtune.report.sections.ladder import ladder
from kvtune.show.charts import SERIES, stacked
from kvtune.show.parts import Cell, Chart, Grid, Section, cell, grid
from kvtune.units import count, ms, percent

PLACE = 20
LIMITS = ("cache", "block", "pool", "unknown")
HIT = "hit"
HIT_COLOUR = "var(--c-hit)"
HIT_MEANING = "read from the cache, not computed"


def section(analysis: RunAnalysis) -> Section | None:
    cache = analysis.prefix_cache
    if not cache.query_tokens:
        return None
    parts, rounds = _parts(cache), analysis.rounds
    where, by_round = _where(cache, parts), _by_round(rounds)
    return Section(
        id="cache",
        title="Prefix cache",
        lead=_lead(cache),
        draw=lambda: (
            _causes(cache, parts, where),
            ladder(analysis),
            _rounds(rounds, by_round) if rounds else None,
        ),
        terminal=(
            by_round.terse("rounds", *by_round.heads),
            where.terse("prefix cache", "where", "prompt tokens", "share"),
        ),
    )


def _lead(cache: PrefixCache) -> str:
    hit = f"{count(cache.hit_tokens)} of {count(cache.query_tokens)} prompt tokens were hits"
    lead = f"{hit} ({percent(cache.hit_tokens, cache.query_tokens)})."
    if UNCLASSIFIED not in cache.misses:
        most = cache.hit_tokens + winnable(cache)
        lead += f" An infinite cache, empty at the start, would have had {percent(most, cache.query_tokens)}."
    return lead


def _parts(cache: PrefixCache) -> dict[str, int]:
    """Return how many prompt tokens hit, then how many missed by each cause."""
    causes = sorted(cache.misses.items(), key=lambda item: _order(item[0]))
    return {HIT: cache.hit_tokens, **{cause: tokens for cause, tokens in causes if tokens}}


def _title(cause: str) -> str:
    return cause if cause == HIT else cause_title(cause)


def _where(cache: PrefixCache, parts: Mapping[str, int]) -> Grid:
    rows = [
        (
            _title(c),
            Cell(count(n), n),
            Cell(percent(n, cache.query_tokens), n),
            HIT_MEANING if c == HIT else cause_meaning(c),
        )
        for c, n in parts.items()
    ]
    return grid(("where", "prompt tokens", "share", "meaning"), rows, "Prompt tokens by where they went")


def _causes(cache: PrefixCache, parts: Mapping[str, int], table: Grid) -> Chart:
    whole = cache.query_tokens
    colors = {_title(cause): _colour(cause, i) for i, cause in enumerate(parts)}
    drawn = [(_title(cause), n, f"{count(n)}, {percent(n, whole)}") for cause, n in parts.items()]
    spec, data = stacked("causes", colors, drawn, "prompt tokens")
    largest = max((c for c in parts if c != HIT), key=lambda c: parts[c], default=None)
    label = f"{percent(cache.hit_tokens, whole)} hits."
    if largest is not None:
        label += f" The largest part of the misses: {_title(largest)}, {percent(parts[largest], whole)}."
    return Chart("causes", "Where the prompt tokens went", label, spec, table, {"causes": data})


def _order(cause: str) -> int:
    """Return a cause's place in the table; one that this version does not know comes after those that can be won."""
    return list(CAUSES).index(cause) if cause in CAUSES else len(WINNABLE)


def _colour(cause: str, number: int) -> str:
    own = HIT_COLOUR if cause == HIT else CAUSES[cause].colour if cause in CAUSES else ""
    return own or SERIES[(5 + number) % len(SERIES)]


def _by_round(rounds: Sequence[Round]) -> Grid:
    rows = [
        (
            Cell(f"round {r.round + 1}", r.round),
            Cell(count(r.query_tokens), r.query_tokens),
            Cell(count(r.hit_tokens), r.hit_tokens),
            Cell(percent(r.hit_tokens, r.query_tokens), r.hit_tokens / max(r.query_tokens, 1)),
            cell(r.ttft_ms_mean, ms),
        )
        for r in rounds
    ]
    return grid(("round", "prompt tokens", "hits", "hit rate", "mean first token"), rows, "Hits by round")


def _rounds(rounds: Sequence[Round], table: Grid) -> Chart:
    names = [f"round {r.round + 1}" for r in rounds]
    hits = [(HIT, r.hit_tokens, count(r.hit_tokens)) for r in rounds]
    computed = [("computed", n, count(n)) for n in (r.query_tokens - r.hit_tokens for r in rounds)]
    colors = {HIT: HIT_COLOUR, "computed": CAUSES["cold"].colour}
    spec, data = stacked("rounds", colors, hits + computed, "prompt tokens", rows=names * 2, of_rows="round")
    label = "Hit rate by round: " + ", ".join(percent(r.hit_tokens, r.query_tokens) for r in rounds[:8])
    label += ", …" if len(rounds) > 8 else "."
    return Chart("rounds", "Hits in each round", label, spec, table, {"rounds": data})
