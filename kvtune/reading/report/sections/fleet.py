"""Engines that share a load: hits and work of each, and what another routing hits. Only for runs of several engines."""

from __future__ import annotations

from collections.abc import Sequence

from kvtune.base.units import count, percent
from kvtune.data.causes import OTHER_REPLICA
from kvtune.data.run.extras import RecordedFleet, SessionRegret, uneven
from kvtune.data.show.parts import Cell, Grid, Section, Tile, cell, grid, grid_of
from kvtune.reading.analysis.fleet import Fleet
from kvtune.reading.analysis.run import RunAnalysis

PLACE = 25


def section(analysis: RunAnalysis) -> Section | None:
    server = analysis.run.header.extra.server
    if server is not None and server.fleet is not None:
        return _recorded(server.fleet)
    fleet = analysis.fleet
    if fleet is None:
        return None
    replicas, routers = _replicas(fleet), _routers(fleet)
    tables = (replicas, *([] if routers is None else [routers]))
    return Section("fleet", "Replicas", _lead(fleet), tables=tables)


def _recorded(info: RecordedFleet) -> Section:
    """Return what each of a recording's servers did, and what routing, pools and workload cost."""
    asked = sum(server.query_tokens for server in info.servers)
    rows = (
        {
            "server": server.url,
            "of the prompt tokens": cell(server.query_tokens, lambda n: percent(n, asked) if asked else "–"),
            "requests": cell(server.requests, count),
            "hit rate": cell(server.rate, percent),
            "another had it, tokens": cell(server.misses.get(OTHER_REPLICA, 0), count),
            "and still held it, tokens": cell(server.still_tokens, count),
            "evicted blocks": cell(server.evicted_blocks, count),
            "note": server.note,
        }
        for server in info.servers
    )
    tables = [grid_of(rows, "What each server did")]
    for funnel, whose in (
        (info.logged, "the log's requests"),
        (info.funnel, "all requests, by events alone"),
    ):
        if funnel is not None and funnel.prompt_tokens:
            costs = [(name, cost.tokens, cost.words(funnel.prompt_tokens)) for name, cost in funnel.steps]
            tables.append(grid(("what costs hits", "tokens", "of all"), costs, f"What {whose} do not hit"))
    if info.sessions:
        tables.append(_sessions(info.sessions))
    funnel = info.logged or info.funnel
    lead = f"{funnel.sentence}{uneven(info.servers)}" if funnel is not None else ""
    return Section("fleet", "Servers behind the router", lead, tables=tuple(tables))


def _sessions(sessions: Sequence[SessionRegret]) -> Grid:
    rows = (
        {
            "session": each.session,
            "requests": cell(each.requests, count),
            "servers": cell(each.replicas, count),
            "hit rate": cell(each.rate, percent),
            "at the best server": Cell(percent(each.best_tokens, each.query_tokens), each.best_tokens),
            "lost tokens": cell(each.best_tokens - each.hit_tokens, count),
        }
        for each in sessions
    )
    return grid_of(rows, "Sessions that the router cost most")


def tiles(fleet: Fleet) -> list[Tile]:
    """Return the figures of a terminal's first screen."""
    hits = ", ".join(percent(replica.rate) for replica in fleet.replicas)
    even = f"; the busiest computed {fleet.balance:.2f} x the mean" if fleet.balance else ""
    routed = f"{fleet.router}: " if fleet.router else ""
    made = [Tile("Replicas", str(len(fleet.replicas)), f"{routed}hits {hits}{even}")]
    if fleet.others:
        made.append(Tile("Routing", percent(fleet.hits.rate), _regret(fleet)))
    return made


def _regret(fleet: Fleet) -> str:
    best, shared = fleet.best, fleet.one_cache
    words = "as routed, no other router here hits more"
    if best is not None:
        words = f"as routed; {best.router} {percent(best.rate)}"
    if shared is not None:
        words += f"; one cache for all {percent(shared.rate)}"
    return words


def _lead(fleet: Fleet) -> str:
    routed = f", routed by {fleet.router}" if fleet.router and not fleet.others else ""
    lead = f"{len(fleet.replicas)} engines shared the load{routed}, each with its own cache."
    return f"{lead} {percent(fleet.hits.rate)} {_regret(fleet)}." if fleet.others else lead


def _replicas(fleet: Fleet) -> Grid:
    rows = (
        {
            "replica": cell(replica.replica, str),
            "requests": cell(replica.requests, count),
            "prompt tokens": cell(replica.query_tokens, count),
            "hits, tokens": cell(replica.hit_tokens, count),
            "hit rate": cell(replica.rate, percent),
            "output, tokens": cell(replica.output_tokens, count),
            "preempted, times": cell(replica.preemptions, count),
            "busy, of the time": cell(replica.busy_share, percent),
        }
        for replica in fleet.replicas
    )
    return grid_of(rows, "What each engine did")


def _routers(fleet: Fleet) -> Grid | None:
    if not fleet.others:
        return None
    rows = [
        (fleet.router, cell(fleet.hits.hit_tokens, count), cell(fleet.hits.rate, percent)),
        *(
            (
                other.router,
                Cell(other.error) if other.error else cell(other.hit_tokens, count),
                cell(other.rate, percent),
            )
            for other in fleet.others
        ),
    ]
    return grid(("router", "hits, tokens", "hit rate"), rows, "The same load, routed otherwise")
