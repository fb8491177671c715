"""What `kvtune check` says: one sentence with the paths that differ, then the paths, and the wrong hits."""

from __future__ import annotations

from kvtune.answers.check.judge import FAULT_SHARE
from kvtune.answers.check.paths import PATHS, TIER
from kvtune.answers.check.result import Check
from kvtune.base.units import count
from kvtune.data.run.signature import identity
from kvtune.data.show.parts import Document, Section, grid
from kvtune.data.show.terminal import Column

HEADS = (Column("path", right=False, folds=True, least=18), Column("", right=False), "hits", "wrong")
MORE = Column("same tokens", rank=2), Column("nats", rank=3), Column("fault seen", rank=1)


def document(check: Check) -> Document:
    noise = (
        f"Cold answers lie up to {check.cold.nats:.2g} nats apart, and {check.cold.equal} of {check.cold.asked} have "
        f"the same tokens: beyond {check.limit_nats:.2g} nats an answer is wrong. Fault seen: the chance to see a "
        f"block of another prompt in {FAULT_SHARE:.0%} of a path's hits."
    )
    rows = []
    for p in (check.cold, check.exchanged, *(each for each in check.paths if each.hits)):
        more = p.equal, f"{p.nats:.2g}", f"{p.seen_with:.0%}"
        rows.append((PATHS[p.name], p.verdict, f"{p.hits} of {p.asked}", p.wrong, *more))
    notes = tuple(f"Not shown: {PATHS[each.name]}: {each.why_not}." for each in check.paths if not each.hits)
    if check.differ:
        by_tier = all(row.path in TIER for row in check.differ)
        flag = "serve without its KV connector" if by_tier else "--no-enable-prefix-caching"
        notes = (f"Until it is mended: {flag}.", *notes)
    section = Section("paths", "Paths", noise, tables=(grid((*HEADS, *MORE), rows),), notes=notes)
    return Document(
        name="kvtune check",
        subject=check.url,
        headline=headline(check),
        sections=(section,),
        identity=identity("check", check.url, check.model, check.version),
        title=f"{check.model} · check · kvtune",
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
        differ = [f"{PATHS[each.name]}: {each.wrong} of {each.hits}" for each in shown if each.wrong]
        which = f", {check.common}" if check.common else ""
        return f"{wrong} of {hits} hits differ from the cold answer{which}; {'; '.join(differ)}"
    if wrong:
        return f"cannot tell: {wrong} of {hits} hits differed once and not again, as noise may (--prompts)"
    if more := max((each.more for each in shown), default=0):
        return f"cannot tell: none of {hits} hits is wrong, and {more} more on a path would do (--prompts)"
    if not shown:
        return "cannot tell: no request hit"
    apart = f"{check.exchanged.wrong} of {check.exchanged.hits} prompts with a block exchanged"
    return f"cannot tell: {apart} were told apart; longer answers may (--tokens)"
