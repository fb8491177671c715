"""Differences in the text of prompts that break the shared prefix: groups, cost, gain of removing them."""

from __future__ import annotations

from collections.abc import Sequence

from kvtune.analysis.run import RunAnalysis
from kvtune.causes import cause_meaning, cause_title
from kvtune.run.extras import ByServer, TextAccount, TextGroup
from kvtune.show.parts import Grid, Section, grid
from kvtune.terminal import Column, printable
from kvtune.units import count, percent
from kvtune.workload.bodies import DATE, DEFAULT_SYSTEM, REASONING, REMINDER

PLACE = 6
CONTEXT = 36
"""Characters shown before a difference, and as many after it."""
MOST = 80
"""The most characters shown of a text that differs."""
LEAST_SHARE = 0.01
"""The least share of the prompt tokens after a difference that is shown."""
SHOWN = 8
"""The most examples shown on a terminal."""
BY_SERVER = {
    DATE: "it writes the date of the day into them, so that each day all prompts miss from there on; for gpt-oss "
    "VLLM_SYSTEM_START_DATE=YYYY-MM-DD on the server pins it, else a --chat-template without it",
    REMINDER: "it moves system messages that stand between others in front of the history, so that each new one "
    "changes the prompt's front; a --chat-template that takes system messages in place ends that",
    DEFAULT_SYSTEM: "it writes a system prompt of the template's into those that have none; give each request the same",
    REASONING: "how much the model is to think differs, and some templates write that in front; keep it the same",
}
"""What a server does to prompts by itself -> in words, with the mend."""
ALWAYS = (DATE, REMINDER)
"""Told even if it is the same for all prompts: the other two change a prefix only if they differ."""
_ESCAPES = str.maketrans({"\n": "\\n", "\r": "\\r", "\t": "\\t"})


def section(analysis: RunAnalysis) -> Section | None:
    account = analysis.run.header.extra.texts
    return None if account is None else drawn(account)


def drawn(account: TextAccount) -> Section:
    # For an engine, `explain` has printed the causes before.
    causes = () if account.engine else (_tokens(account),)
    lead = _lead(account)
    groups = [one for one in account.groups if _is_shown(one, account)]
    tables = (*causes, *([_groups(groups, account)] if groups else ()))
    examples = [_example(one, account) for one in groups]
    mends = tuple(f"{title}: {mend}" for title, mend in {one.title: one.mend for one in groups}.items())
    small, more, listed = len(account.groups) - len(groups), tuple[str, ...](), tuple[str, ...]()
    if small:
        differences = "difference" if small == 1 else "differences"
        left_out = f"{count(small)} more {differences} under 1 % of the {account.unit} each"
        more, listed = (f"{left_out}.",), (f"{left_out}: --json lists them.",)
    terminal = ["\n".join((where, *(f"  {text}" for text in texts))) for where, *texts in examples]
    beside = grid(
        ("example", "the earlier prompt", "this prompt"),
        examples,
        "Two prompts each, « » around what differs",
    )
    return Section(
        id="text",
        title="The text that breaks the prefix",
        lead=lead,
        tables=(*tables, beside) if account.with_text and examples else tables,
        notes=(*mends, *more, *_by_server(account)),
        terminal=(lead, *tables, *terminal[:SHOWN], *mends, *listed, *_by_server(account)),
    )


def _by_server(account: TextAccount) -> list[str]:
    """Say what the server does to prompts by itself, where that may break a prefix."""
    found: dict[str, list[ByServer]] = {}
    for one in account.by_server:
        found.setdefault(one.kind, []).append(one)
    said = []
    for kind, ones in found.items():
        prompts = sum(one.requests for one in ones)
        changes = len(ones) > 1 or prompts < account.requests
        if kind in BY_SERVER and (changes or kind in ALWAYS):
            where = ", ".join(f"{one.where} in {count(one.requests)}" for one in ones if one.where)
            said.append(
                f"The server itself, in {count(prompts)} prompts: {BY_SERVER[kind]}{f' ({where})' if where else ''}"
            )
    return said


def _is_shown(one: TextGroup, account: TextAccount) -> bool:
    return one.tokens_after >= LEAST_SHARE * account.query_tokens


def _lead(account: TextAccount) -> str:
    tokens = account.misses.get("diverged", 0)
    unit = account.unit
    if not account.groups:
        lead = f"No prompt of {count(account.requests)} agrees with an earlier one after a difference to it."
    else:
        lead = (
            f"{count(tokens)} {unit} ({percent(tokens, account.query_tokens)} of {count(account.requests)} prompts) "
            "stand in an earlier prompt, too, after a text that differs."
        )
        if account.mended_query_tokens:
            gain = 100 * (
                account.mended_hit_tokens / account.mended_query_tokens
                - account.hit_tokens / account.query_tokens
            )
            lead += (
                f" With that text after the shared part, a replay's hit rate changes by {gain:+.1f} points."
            )
    if account.with_text and any(_is_shown(one, account) for one in account.groups):
        lead += " Texts of prompts follow."
    if unit == "bytes":
        lead += " Without a tokenizer: all counts are UTF-8 bytes, in a plain form of the messages."
    elif account.rendered_by:
        lead += f" Its text was rendered by {account.rendered_by}."
    if not account.engine:
        lead += " No engine was replayed: a hit is what a cache that keeps everything would have."
    return lead


def _tokens(account: TextAccount) -> Grid:
    whole = account.query_tokens
    rows = [("hit", count(account.hit_tokens), percent(account.hit_tokens, whole), "")]
    for cause, tokens in sorted(account.misses.items(), key=lambda item: -item[1]):
        if tokens:
            rows.append((cause_title(cause), count(tokens), percent(tokens, whole), cause_meaning(cause)))
    heads = (
        Column("prompts", folds=True, least=16),
        Column(account.unit),
        Column("share"),
        Column("meaning", right=False, folds=True, rank=1),
    )
    return grid(heads, rows, f"Where the {account.unit} of the prompts went")


def _groups(groups: Sequence[TextGroup], account: TextAccount) -> Grid:
    replayed = any(one.query_tokens for one in groups)
    rows = [
        (
            one.title,
            _where(one),
            count(one.requests),
            count(one.at),
            count(one.tokens_after),
            percent(one.tokens_after, account.query_tokens),
            *(
                (_gain(hits, one, account) for hits in (one.hit_tokens, one.with_before_hit_tokens))
                if replayed
                else ()
            ),
        )
        for one in groups
    ]
    heads = (
        Column("what differs", folds=True, least=16),
        Column("where", right=False, folds=True, least=12, rank=3),
        Column("requests"),
        Column(f"from {account.unit[:-1]}", rank=2),
        Column("known after it"),
        Column("share", rank=1),
        *((Column("mended alone", rank=0), Column("with all before it", rank=0)) if replayed else ()),
    )
    return grid(heads, rows, f"Differences by kind and place, in {account.unit}")


def _where(one: TextGroup) -> str:
    line = f" line {count(one.line)}" if one.line and not one.place.startswith("a ") else ""
    label = f", after {printable(one.label)}" if one.label else ""
    return f"{printable(one.place)}{line}{label}" if one.place else "–"


def _gain(hits: int, one: TextGroup, account: TextAccount) -> str:
    if not one.query_tokens:
        return "–"
    return f"{100 * (hits / one.query_tokens - account.hit_tokens / account.query_tokens):+.1f} points"


def _example(one: TextGroup, account: TextAccount) -> tuple[str, ...]:
    """Return an example: two requests and their texts, with « » around the part that differs."""
    where = f"{one.title}, from {account.unit[:-1]} {count(one.at)}: {one.request} differs from {one.like}"
    if one.place:
        where += f" in {_where(one)}"
    if not account.with_text:
        return (where,)
    before, after = one.before[-CONTEXT:], one.after[:CONTEXT]
    texts = (f"{before}«{_short(text)}»{after}".translate(_ESCAPES) for text in (one.old, one.new))
    return (where, *map(printable, texts))


def _short(text: str) -> str:
    return text if len(text) <= MOST else f"{text[: MOST // 2]} .. {text[-MOST // 2 :]}"
