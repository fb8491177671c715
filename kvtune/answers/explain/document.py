"""What `kvtune explain` and `explain-log` say: where prompt tokens went, what helps, how far the replay is the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from kvtune.answers.explain.explanation import Counts, Explanation
from kvtune.answers.explain.log import TextAnswer
from kvtune.answers.states.document import section as states_section
from kvtune.base.units import count, ms, percent
from kvtune.data.causes import CAUSES, cause_meaning, cause_title
from kvtune.data.run.extras import TextAccount
from kvtune.data.run.signature import identity
from kvtune.data.show.parts import Document, Grid, Section, grid, grid_of
from kvtune.data.show.terminal import Column
from kvtune.reading.analysis.replayed import helping, more_tries, points, tried, within_gap
from kvtune.reading.report.replayed import helps, text_section

SHOWN_DISAGREEMENTS = 3
OTHER_CORE = (
    "not compared with the hits that the log's server reported: this is a replay of kvtune's core; add --core stock, "
    "and the server's flags after `--`"
)
"""A note of a log with hits whose server had another core."""


def document(answer: Explanation | TextAnswer, subject: str) -> Document:
    """Return the answer. `subject`: the run file or the log."""
    if isinstance(answer, TextAnswer):
        name, line, sections = "kvtune explain-log", _bound(answer.texts), [text_section(answer.texts)]
    else:
        name, line, sections = (
            f"kvtune explain{'-log' * (answer.of == 'log')}",
            headline(answer),
            [*_sections(answer)],
        )
    made = identity(name, subject)
    return Document(
        name, subject, line, tuple(sections), made, title=f"{subject} · {name.split()[1]} · kvtune"
    )


def _sections(explanation: Explanation) -> Iterator[Section]:
    yield _misses(explanation)
    if explanation.other is not None:
        yield _remedies(explanation)
    if explanation.states is not None:
        yield states_section(explanation.states)
    yield _replay(explanation)
    if explanation.texts is not None:
        yield text_section(explanation.texts)


def _bound(texts: TextAccount) -> str:
    """Return what a cache that keeps everything hits, the answer without a replay."""
    hit, moved = (
        percent(tokens, texts.query_tokens) for tokens in (texts.hit_tokens, texts.misses.get("diverged", 0))
    )
    line = f"a cache that keeps everything hits {hit} of {count(texts.query_tokens)} {texts.unit}; {moved} miss only "
    return f"{line}because a text before them differs"


def headline(explanation: Explanation) -> str:
    """Return the answer in one sentence: the hits, the cause of most misses, what brings most."""
    tally = explanation.prefix_cache
    query = tally.query_tokens
    line = f"{percent(tally.rate)} of {count(query)} prompt tokens hit"
    if misses := {cause: tokens for cause, tokens in tally.misses.items() if tokens}:
        most = max(misses, key=lambda cause: misses[cause])
        line += f"; {percent(misses[most], query)} miss: {cause_title(most)}"
    if rows := helps(explanation.replayed, explanation.texts).rows:
        line += f"; {rows[0][0].text}: {rows[0][1].text}"
    return line


def _misses(explanation: Explanation) -> Section:
    tally, tier = explanation.prefix_cache, explanation.tier_hit_tokens
    query, hit, misses = tally.query_tokens, tally.hit_tokens, tally.misses
    rows = [("hit", hit, f"{percent(tier, query)} of host memory" if tier else "")]
    rows += [
        (cause, misses[cause], cause_meaning(cause)) for cause in sorted(misses, key=lambda c: -misses[c])
    ]
    rows += [("", hit + sum(misses.values()), "")]
    causes = grid_of(
        {
            Column("cause"): name,
            Column("tokens"): count(tokens),
            Column("share"): percent(tokens, query),
            Column("meaning", right=False, folds=True, rank=1, least=30): words,
        }
        for name, tokens, words in rows
        if tokens or name == "hit"
    )
    by_class = [_by_class(explanation.by_class)] if len(explanation.by_class) > 1 else []
    groups = grid_of(
        {
            Column("KV cache group that caused it"): group,
            Column("tokens", right=False, folds=True): ", ".join(
                f"{cause} {count(tokens)}" for cause, tokens in counts.items() if tokens
            ),
        }
        for group, counts in explanation.by_group.items()
    )
    evictions = grid_of(
        {
            "evicted by": each.pressure,
            "tokens": count(each.tokens),
            "median age at the miss": ms(each.median_age_s * 1000),
            "at most": ms(each.max_age_s * 1000),
        }
        for each in explanation.evictions
    )
    return Section(
        "misses",
        f"{count(query)} prompt tokens of {count(explanation.requests)} requests",
        lead=" ".join(_gap(explanation)),
        tables=(causes, *by_class, groups, evictions),
        notes=tuple(_computed_twice(explanation.computed_twice)),
    )


def _gap(explanation: Explanation) -> Iterator[str]:
    """Yield how far the replay is from the run: no gain below that is told."""
    query, ran = explanation.prefix_cache.query_tokens, explanation.run_hit_tokens
    if ran is not None and (explanation.gap_tokens or explanation.differing_requests or explanation.speed):
        run, replay = percent(ran, query), percent(explanation.prefix_cache.rate)
        gap = percent(abs(explanation.gap_tokens), query).removesuffix(" %")
        yield f"Hits: {explanation.of} {run}, its replay {replay}: gap {gap} points."
    if explanation.speed:
        yield f"Replayed {explanation.speed}."


def _by_class(rows: dict[str, Counts]) -> Grid:
    """Return causes by class. A narrow terminal leaves out the smallest causes."""
    total = {cause: sum(row.get(cause, 0) for row in rows.values()) for cause in CAUSES}
    causes = sorted((cause for cause in total if total[cause]), key=lambda cause: -total[cause])
    columns = [Column("class", folds=True, least=16), Column("tokens"), Column("hit")]
    columns += [Column(cause, rank=rank) for rank, cause in enumerate(causes)]
    cells = [
        (name, count(row["query"]), *(percent(row[name], row["query"]) for name in ("hit", *causes)))
        for name, row in rows.items()
    ]
    return grid(columns, cells)


def _computed_twice(by_request: dict[str, Counts]) -> Iterator[str]:
    """Yield the tokens that preempted requests computed twice, by cause, and the request with the most."""
    if not by_request:
        return
    total = Counter[str]()
    for counts in by_request.values():
        total.update(counts)
    causes = ", ".join(f"{cause} {count(tokens)}" for cause, tokens in total.items())
    most, worst = max((sum(counts.values()), request) for request, counts in by_request.items())
    yield (
        f"Computed twice after preemptions of {count(len(by_request))} requests: {count(total.total())} tokens "
        f"({causes}); the most: {worst}, {count(most)} tokens."
    )


def _remedies(explanation: Explanation) -> Section:
    """Return the settings that help and their commands, and the others that were tried."""
    replayed, texts = explanation.replayed, explanation.texts
    best, small = helping(replayed), within_gap(replayed)
    table = helps(replayed, texts)
    serve = {
        each.change: each.serve for each in (explanation.other, *explanation.remedies) if each is not None
    }
    notes = [] if best else ["None of the settings that were replayed helps."]
    if small:
        gap = points(abs(replayed.gap_tokens), replayed.query_tokens).removeprefix("+")
        gain = "gains" if len(small) == 1 else "gain"
        notes.append(
            f"{len(small)} more {gain} less than the gap of {gap} between {explanation.of} and replay."
        )
    others = [each for each in tried(replayed) if each not in best and each not in small and not each.error]
    if others:
        gains = (f"{each.change} ({points(each.gain_tokens, replayed.query_tokens)})" for each in others)
        notes.append(f"Tried, each under a point: {'; '.join(gains)}.")
    notes += [f"Failed: {each.change}: {each.error}" for each in tried(replayed) if each.error]
    notes += [f"{more}." for more in (more_tries(replayed),) if more]
    lead = "The commands serve these settings, in their order." if len(best) > 1 else ""
    return Section(
        "remedies",
        "What helps, each replayed" if table.rows else "What was replayed",
        lead=lead,
        tables=(table,),
        notes=tuple(notes),
        commands=tuple(serve[each.change] for each in best),
    )


def _replay(explanation: Explanation) -> Section:
    """Say whether the replay hits what the run hit, and what else was noted."""
    source, differing = explanation.of, explanation.differing_requests
    notes, rows = [], []
    if explanation.run_hit_tokens is None:
        if OTHER_CORE not in explanation.notes:
            notes.append(
                f"The {source} has no hits of each request, so the replay could not be checked against it."
            )
    elif not differing:
        tokens = count(explanation.run_hit_tokens)
        notes.append(f"Checked: {source} and replay hit the same tokens in every request ({tokens} in all).")
    else:
        replayed = count(explanation.prefix_cache.hit_tokens)
        notes.append(
            f"The replay differs from the {source} in {count(differing)} of {count(explanation.requests)} requests: "
            f"the {source} hit {count(explanation.run_hit_tokens)} tokens, the replay {replayed} (the "
            "figures above explain the replay)."
        )
        if source == "log" and explanation.cold_replays == differing:
            notes.append(
                "In each of these the server hit and the replay did not: the server was warm when the log began, the "
                "replay begins with an empty cache."
            )
        rows = [
            (each.request, count(each.run_hit_tokens), count(each.replayed_hit_tokens))
            for each in explanation.disagreements[:SHOWN_DISAGREEMENTS]
        ]
    if explanation.not_admitted:
        requests = "request" if explanation.not_admitted == 1 else "requests"
        notes.append(
            f"Left out: {count(explanation.not_admitted)} {requests} that the run or the replay sent, but did not look "
            "up in the cache."
        )
    table = grid(("hit tokens of", source, "replay"), rows)
    return Section("replay", "The replay", tables=(table,), notes=(*notes, *explanation.notes))
