"""A watched server: its prompt tokens by hit and cause of miss, its prefixes, and where prompts differ."""

from __future__ import annotations

from kvtune.base.units import count, percent
from kvtune.data.causes import cause_meaning, cause_title
from kvtune.data.run.extras import ServerAccount, ServerPart
from kvtune.data.show.parts import Grid, Section, grid, grid_of
from kvtune.data.show.terminal import Column
from kvtune.data.tally import Tally
from kvtune.reading.analysis.run import RunAnalysis

PLACE = 5


def section(analysis: RunAnalysis) -> Section | None:
    account = analysis.run.header.extra.server
    if account is None:
        return None
    parts: list[tuple[str, ServerPart | ServerAccount]] = [
        (f"{name} the restart ({part.begin_s:,.0f} to {part.end_s:,.0f} s)", part)
        for name, part in zip(["before", *["after"] * len(account.parts)], account.parts, strict=False)
    ]
    tables = [
        _tokens(title, part, part.loaded_tokens, account.events)
        for title, part in parts
        or [(f"all requests of {'all servers' if account.fleet else 'the server'}", account)]
    ]
    if account.logged:
        tables.append(_tokens("requests of the log", analysis.prefix_cache, 0, account.events))
    lists = _lists(account)
    lead = " ".join(part for part in (_lead(account), _joined(account)) if part)
    return Section(
        id="server",
        title="The server" if account.fleet is None else "All servers",
        lead=lead,
        tables=(*tables, *lists),
    )


def _tokens(title: str, tally: Tally, loaded: int, events: str) -> Grid:
    whole, hit, missed = tally.query_tokens, tally.hit_tokens, tally.missed
    rows = [("hit", count(hit), percent(hit, whole), "read from the cache, not computed")]
    if loaded:
        of_hits = "of the hits: from host memory or another machine"
        rows.append(("loaded by a connector", count(loaded), percent(loaded, whole), of_hits))
    for cause, tokens in sorted(tally.misses.items(), key=lambda item: -item[1]):
        rows.append((cause_title(cause), count(tokens), percent(tokens, whole), cause_meaning(cause)))
    if not tally.misses and missed > 0:
        why = "the server's KV events were not heard: no causes"
        if events == "off":
            why = "the server published no KV events: no causes"
        rows.append(("missed", count(missed), percent(missed, whole), why))
    heads = (
        Column(title, folds=True, least=16),
        Column("tokens"),
        Column("share"),
        Column("meaning", right=False, folds=True, rank=1),
    )
    return grid(heads, rows, f"Where the prompt tokens went: {title}")


def _lists(account: ServerAccount) -> list[Grid]:
    prefixes = (
        {
            "prefix, by its first block": prefix.first,
            "visits": count(prefix.visits),
            "hit": count(prefix.hit_tokens),
            "seen, and missed": count(prefix.lost_tokens),
            "longest": count(prefix.longest_tokens),
        }
        for prefix in account.prefixes
    )
    points = (
        {
            "differs at token": count(divergence.position),
            "times": count(divergence.times),
            "new tokens": count(divergence.new_tokens),
            "prefix": divergence.first,
        }
        for divergence in account.divergences
    )
    least = "at least: prompts that stored no whole block are in no row"
    prefixes_title = f"Prefixes, in tokens ({least})"
    return [grid_of(prefixes, prefixes_title), grid_of(points, "Where a prompt differs from an earlier one")]


def _lead(account: ServerAccount) -> str:
    hit = percent(account.rate)
    whose = f"{len(account.fleet.servers)} servers" if account.fleet is not None else "the server"
    lead = (
        f"In {account.seconds:,.0f} s {whose} answered {count(account.requests)} requests with "
        f"{count(account.query_tokens)} prompt tokens; {hit} of them hit."
    )
    if account.restarts:
        times = "1 time" if account.restarts == 1 else f"{account.restarts} times"
        lead += f" The server restarted {times}: cache and account began anew, and the lists are of the last part."
    if account.resets:
        lead += f" Its cache was reset {count(account.resets)} x."
    if account.evicted_blocks:
        lead += f" {count(account.evicted_blocks)} blocks were evicted."
    if account.recomputed_tokens:
        lead += (
            f" {count(account.recomputed_tokens)} tokens more were stored than missed: computed again after "
            "preemption, or answers that could not be told from prompts."
        )
    if account.events == "on" and not account.complete:
        lead += " What was cached before kvtune joined is not known."
    return lead


def _joined(account: ServerAccount) -> str:
    if not account.logged:
        return ""
    if account.events != "on" or account.by_log:
        return (
            f"Of {count(account.logged)} requests of the log the server reported the hits. What it had computed before "
            "and did not hit is known; why it was not cached, only KV events tell, without a connector or match unit."
        )
    sentence = f"Joined with {count(account.logged)} requests of the log"
    if not account.reported:
        return f"{sentence}. Their hits and causes are kvtune's: the log has no counts of the server to check them by."
    sentence += f": {count(account.agree)} of {count(account.reported)} have the hit that the server reported"
    if account.agree == account.reported == account.logged:
        return f"{sentence}. Their causes are exact to the token."
    return f"{sentence}. The causes of these are exact to the token; those of the others are estimates."
