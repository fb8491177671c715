"""What `kvtune watch` says of a server: what it does now, where its prompt tokens went, prefixes, differences."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from kvtune.base.units import count, ms, percent, size
from kvtune.data.causes import NOT_KEPT, OTHER_REPLICA, cause_title
from kvtune.data.run.extras import ServerPrefix, ServerShare, uneven
from kvtune.data.run.signature import identity
from kvtune.data.show.parts import Document, Section, cell, grid
from kvtune.data.show.terminal import Column
from kvtune.data.tally import Tally
from kvtune.servers.watch.regime import Finding
from kvtune.servers.watch.servers import FleetSnapshot
from kvtune.servers.watch.snapshot import SPANS, DifferenceText, Period, Snapshot, Times

DASH = "–"
SORTS: dict[str, Callable[[ServerPrefix], int]] = {
    "tokens": lambda prefix: prefix.hit_tokens + prefix.lost_tokens,
    "lost": lambda prefix: prefix.lost_tokens,
    "visits": lambda prefix: prefix.visits,
}
PREFIXES = (
    *(Column(head) for head in ("first block", "visits, at least", "hit", "lost", "longest")),
    Column("text", right=False, rank=1, folds=True),
)
DIFFERENCES = (
    *(Column(head) for head in ("differs at token", "times", "new tokens", "prefix")),
    Column("text", right=False, folds=True),
)
TIER = ("stored", "blocks of a group", "kept now", "tokens asked for", "loadable", "loaded")


SERVERS = (
    Column("server", right=False),
    *(Column(head) for head in ("prompt tokens", "requests", "hit")),
    Column("another replica had it", folds=True, least=24),
    *(Column(head) for head in ("evicted blocks", "pool, blocks")),
)


def document(
    shot: Snapshot | FleetSnapshot, sort: str = "tokens", prefixes: int = 20, differences: int = 20
) -> Document:
    """Return the answer with at most `prefixes` prefixes, in the order of `sort`, and `differences` differences."""
    if isinstance(shot, FleetSnapshot):
        return _of_fleet(shot)
    engines = f", {shot.engines} engines" if shot.engines > 1 else ""
    state = f", started anew {shot.restarts} x: all below is since then" if shot.restarts else ""
    if shot.down_since is not None:
        state = time.strftime("   DOWN since %H:%M:%S", time.localtime(shot.down_since))
    return Document(
        name="kvtune watch",
        subject=shot.url,
        headline=f"{shot.url}   {shot.model}   {f'vLLM {shot.vllm}'.strip()}{engines}{state}",
        sections=tuple(_sections(shot, sort, prefixes, differences)),
        identity=identity("watch", shot.url, shot.at),
        title=f"{shot.url} · watch · kvtune",
    )


def _of_fleet(shot: FleetSnapshot) -> Document:
    asked = sum(server.query_tokens for server in shot.servers)
    served = sum(server.requests for server in shot.servers)
    rows = [
        (
            server.url,
            percent(server.query_tokens, asked) if asked else DASH,
            percent(server.requests, served) if served else DASH,
            percent(server.hit_tokens, server.query_tokens) if server.query_tokens else DASH,
            _elsewhere(server),
            count(server.evicted_blocks),
            DASH
            if server.pool_use is None
            else f"{percent(server.pool_use)} of {count(server.pool_blocks or 0)}",
        )
        for server in shot.servers
    ]
    named = [f"{server.url}: {server.note}" for server in shot.servers if server.note]
    total = Tally.sum(server for server in shot.servers if server.model == shot.model)
    silent = [server.url for server in shot.servers if not server.model and server.down_since is not None]
    unknown = f"; {', '.join(silent)} has not answered: what it had computed is unknown" if silent else ""
    causes = sorted(total.misses, key=lambda cause: -total.misses[cause])
    where = [("prompt tokens", count(total.query_tokens)), ("hit", _part(total, total.hit_tokens))]
    where += [(cause_title(cause), _part(total, total.misses[cause])) for cause in causes]
    return Document(
        name="kvtune watch",
        subject=f"{len(shot.servers)} servers",
        headline=f"{len(shot.servers)} servers   {shot.model}   {shot.fleet.sentence}{uneven(shot.servers)}{unknown}",
        sections=(
            Section(
                "servers",
                "Servers, each since its start or since kvtune joined",
                tables=(grid(SERVERS, rows),),
            ),
            Section(
                "hits",
                "Where prompt tokens went",
                tables=(grid((Column("prefix cache"), Column("")), where),),
            ),
            Section("notes", "Notes", notes=(*named, *shot.notes)),
        ),
        identity=identity("watch", *(server.url for server in shot.servers), shot.at),
        title=f"{len(shot.servers)} servers · watch · kvtune",
    )


def _elsewhere(server: ServerShare) -> str:
    tokens = server.misses.get(OTHER_REPLICA, 0)
    if not server.query_tokens or not server.misses:
        return DASH
    still = (
        f"; {percent(server.still_tokens, tokens)} of that was there when it was asked for" if tokens else ""
    )
    age = f", stored {ms(1000 * server.still_s)} before" if tokens and server.still_s is not None else ""
    return f"{percent(tokens, server.query_tokens)}{still}{age}"


def _part(tally: Tally, tokens: int) -> str:
    return percent(tokens, tally.query_tokens) if tally.query_tokens else DASH


def _sections(shot: Snapshot, sort: str, prefixes: int, differences: int) -> Iterator[Section]:
    why = ", ".join(f"{name} {number}" for name, number in sorted(shot.waiting_by_reason.items()))
    waiting = _number(shot.waiting) + (f" ({why})" if why else "")
    blocks = f" of {count(shot.pool_blocks)} blocks of {shot.block_size}" if shot.pool_blocks else ""
    facts = (
        (
            "requests",
            f"running {_number(shot.running)}, waiting {waiting}, preempted {_number(shot.preemptions)}",
        ),
        ("pool", f"{DASH if shot.pool_use is None else percent(shot.pool_use)}{blocks}"),
        ("tokens/s", f"prompt {_number(shot.prompt_tokens_s)}, output {_number(shot.output_tokens_s)}"),
        ("times", f"first token {_pair(shot.first_token)}, between tokens {_pair(shot.between_tokens)}"),
        *((("drafts", shot.drafts.sentence),) if shot.drafts else ()),
    )
    yield Section("now", "Now", facts=facts)
    if shot.regime is not None:
        yield regime_section(shot.regime)
    yield _hits(shot)
    if (use := shot.tier) is not None:
        row = [use.stored_blocks, use.kept_blocks, use.asked_tokens, use.loadable_tokens, use.loaded_tokens]
        cells = [cell(use.stored_bytes, size), *(cell(each, count) for each in row)]
        yield Section("tier", "The tier below the pool", use.verdict, tables=(grid(TIER, [cells]),))
    yield Section("notes", "Notes", notes=tuple(shot.notes))
    if shot.possible is not None:
        yield Section("possible", "What can hit here", notes=tuple(shot.possible.lines))
    rows = [
        (
            row.first,
            *map(count, (row.visits, row.hit_tokens, row.lost_tokens, row.longest_tokens)),
            " ".join(shot.texts.get(row.first, "").split())[:40],
        )
        for row in sorted(shot.prefixes, key=SORTS[sort], reverse=True)[:prefixes]
    ]
    yield Section("prefixes", f"Prefixes by {sort}", tables=(grid(PREFIXES, rows),))
    texts = [*map(_change, shot.differences), *[""] * len(shot.divergences)]
    points = [
        (*map(count, (row.position, row.times, row.new_tokens)), row.first, text)
        for row, text in zip(shot.divergences[:differences], texts, strict=False)
    ]
    yield Section("differences", "Where prompts differ", tables=(grid(DIFFERENCES, points),))
    more = tuple((step.what, step.command) for step in shot.next)
    yield Section("next", "What would tell more", commands=more)


def regime_section(finding: Finding, name: str = "regime", whose: str = "") -> Section:
    """Return what bounds a server, with the figures that say so and the one that would refute it."""
    refuted = [f"refuted by: {finding.refuted_by}"] if finding.refuted_by else []
    return Section(
        name,
        f"{whose}{'what bounded' if whose else 'What bounds'} it, "
        f"by {count(finding.looks)} looks in {finding.seconds:.1f} s",
        lead=finding.sentence,
        facts=tuple((fact.name, fact.value) for fact in finding.facts),
        notes=(*refuted, *finding.missing),
    )


def _hits(shot: Snapshot) -> Section:
    named: dict[str, Period] = {}
    for name, period in shot.periods.items():
        # By what they span: it may not have been watched for as long yet.
        short = period.seconds < 0.9 * SPANS.get(name, 0.0)
        named.setdefault(f"{period.seconds:.0f} s" if short else name, period)
    periods = list(named.items())
    last = periods[-1][1].misses
    causes = sorted({c: 0 for _, period in periods for c in period.misses}, key=lambda c: -last.get(c, 0))
    rows = [
        ("prompt tokens", *(count(period.query_tokens) for _, period in periods)),
        ("hit", *(_part(period, period.hit_tokens) for _, period in periods)),
    ]
    if any(period.loaded_tokens for _, period in periods):
        rows.append(("  loaded by a connector", *(_part(each, each.loaded_tokens) for _, each in periods)))
    rows += [(cause_title(c), *(_part(each, each.misses.get(c, 0)) for _, each in periods)) for c in causes]
    if not causes:
        rows.append(("missed", *(_part(each, each.missed) for _, each in periods)))
    columns = [Column("prefix cache", folds=True, least=20)]
    columns += [
        Column(name, rank=(1, 2, 0)[-len(periods) :][index]) for index, (name, _) in enumerate(periods)
    ]
    notes = []
    if shot.evicted_blocks_s is not None:
        age_s = shot.evicted_age_s
        age = "" if age_s is None else f", stored {ms(1000 * age_s)} before (median)"
        held = f"; {count(shot.cached_blocks)} blocks cached" if shot.cached_blocks is not None else ""
        notes.append(f"evicted {shot.evicted_blocks_s:,.1f} blocks/s{age}{held}")
    if last.get(NOT_KEPT) and shot.possible is not None and shot.possible.keeps_more:
        notes.append(f"{cause_title(NOT_KEPT)}: {shot.possible.keeps_more}")
    return Section("hits", "Where prompt tokens went", tables=(grid(columns, rows),), notes=tuple(notes))


def _change(texts: DifferenceText) -> str:
    before, earlier, later = (" ".join(text.split()) for text in (texts.before, texts.earlier, texts.later))
    return f"{before[-20:]} «{earlier[:20]}» «{later[:20]}»"


def _number(value: float | None) -> str:
    return DASH if value is None else count(value)


def _pair(times: Times) -> str:
    if times.median_ms is None:
        return DASH
    return f"{ms(times.median_ms)} (99 %: {ms(times.p99_ms or times.median_ms)})"
