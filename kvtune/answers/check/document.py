"""What `kvtune check` says: one sentence with the paths that differ, then the paths, and what wrong hits share."""

from __future__ import annotations

from kvtune.answers.check.judge import FAULT_SHARE
from kvtune.answers.check.result import Check
from kvtune.base.commands import command
from kvtune.base.units import count, percent
from kvtune.data.run.signature import identity
from kvtune.data.show.parts import Banner, Document, Grid, Section, grid
from kvtune.data.show.terminal import Column

HEADS = (
    Column("path", right=False, folds=True, least=18),
    Column("", right=False),
    *(Column("hits"), Column("wrong"), Column("same tokens", rank=2), Column("nats", rank=3)),
    Column("fault seen", rank=1),
)
SHARED = (Column("hits with", right=False, folds=True, least=18), Column("wrong"), Column("of the others"))


def document(check: Check) -> Document:
    shared = [(c.what, f"{c.wrong} of {c.hits}", f"{c.others_wrong} of {c.others}") for c in check.common]
    again = [("Run it again", command("check", "--replay", check.bundle, check.url))]
    if check.layout.tier:
        resume = command("check", "--resume", check.bundle, check.url)
        again.append(("Ask for the tier's blocks after a restart of the server", resume))
    salts = f"{check.unsalted} requests hit although nobody had used their cache_salt: prompts of others are shared"
    noise = (
        f"Cold answers lie up to {check.cold.nats:.2g} nats apart, and {check.cold.equal} of {check.cold.asked} have "
        f"the same tokens: beyond {check.limit_nats:.2g} nats an answer is wrong. Fault seen: the chance to see a "
        f"block of another prompt in {FAULT_SHARE:.0%} of a path's hits."
    )
    section = Section(
        "paths",
        "Paths",
        noise,
        tables=(_table(check), *([grid(SHARED, shared, "What wrong hits share.")] if shared else [])),
        notes=tuple(f"Not shown: {each.title}: {each.why_not}." for each in check.paths if not each.hits),
        commands=tuple(again) if check.bundle else (),
    )
    return Document(
        name="kvtune check",
        subject=check.url,
        headline=headline(check),
        sections=(section,),
        identity=identity("check", check.url, check.model, check.version),
        title=f"{check.model} · check · kvtune",
        banners=(Banner("bad", "cache_salt is ignored", salts),) if check.unsalted else (),
        closing=f"{check.requests} requests, {count(check.computed_tokens)} tokens computed, vLLM {check.version}",
    )


def headline(check: Check) -> str:
    """Return the answer in one sentence."""
    shown = [each for each in check.paths if each.hits]
    hits, wrong = sum(each.hits for each in shown), sum(each.wrong for each in shown)
    if check.unsalted:
        return "cache_salt is ignored: prompts with different salts hit each other's blocks"
    if check.verdict == "as cold":
        return f"hits: {hits} of {hits} answer as cold, on {len(shown)} paths"
    if check.verdict == "differs":
        differ = [f"{each.title}: {each.wrong} of {each.hits}" for each in shown if each.wrong]
        differ += [
            f"{each.what}: {each.wrong} of {each.hits}, others {each.others_wrong} of {each.others}"
            for each in check.common[:1]
        ]
        return f"{wrong} of {hits} hits differ from the cold answer; {'; '.join(differ)}"
    if more := max((each.more for each in shown), default=0):
        return f"cannot tell: none of {hits} hits is wrong, and {more} more on a path would do (--prompts)"
    apart = (
        f"of {check.exchanged.hits} prompts with a block exchanged {check.exchanged.wrong} were told apart"
    )
    return f"cannot tell: {f'{apart}; longer answers may (--tokens)' if shown else 'no request hit'}"


def _table(check: Check) -> Grid:
    rows = []
    for each in (check.cold, check.exchanged, *(each for each in check.paths if each.hits)):
        path = each.verdict != "not shown"
        hits = f"{each.hits} of {each.asked}" if path else "–"
        seen, verdict = (percent(each.seen_with, digits=0), each.verdict) if path else ("–", "")
        rows.append((each.title, verdict, hits, each.wrong, each.equal, f"{each.nats:.2g}", seen))
    return grid(HEADS, rows)
