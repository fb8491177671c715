"""Sections that `explain` and a run's page both have: what helps, and the text in prompts that breaks the prefix."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvtune.base.units import count, percent
from kvtune.data.causes import cause_meaning, cause_title
from kvtune.data.run.extras import ByServer, Remedy, Replayed, TextAccount, TextGroup
from kvtune.data.show.parts import Cell, Grid, Section, grid, grid_of
from kvtune.data.show.terminal import Column, printable
from kvtune.reading.analysis.replayed import Mend, brings, flags_only, helping, mends, needs, points
from kvtune.requests.log.bodies import DATE, DEFAULT_SYSTEM, REASONING, REMINDER

CONTEXT = 36
"""Characters shown before a difference, and as many after it."""
MOST = 80
"""The most characters shown of a text that differs."""
LEAST_SHARE = 0.01
"""The least share of the prompt tokens after a difference that is shown."""
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
HELPS = (
    Column("setting", folds=True, least=34),
    Column("brings"),
    Column("hits", rank=1),
    Column("against", right=False, rank=4),
    Column("takes", right=False, folds=True, rank=2, least=14),
    Column("needs", right=False, folds=True, rank=3, least=12),
)


def helps(
    replayed: Replayed,
    texts: TextAccount | None,
    commands: Callable[[Remedy], tuple[str, str]] | None = None,
) -> Grid:
    """Return what helps, the best first. `commands`: those that measure and serve a setting, as two more columns.

    For a run of stock vLLM, what needs no kvtune comes first.
    """
    query = replayed.query_tokens

    def row(each: Mend | Remedy, name: str, gain: str, *words: str) -> tuple[object, ...]:
        hits = Cell(percent(each.hit_tokens, query), each.hit_tokens)
        return name, Cell(gain, each.gain_tokens), hits, *words

    stock = replayed.other is not None and replayed.other.core == "kvtune"
    rows = []
    for mend in mends(texts, replayed):
        words = (f"mend the prompts, {mend.what}", f"{points(mend.gain_tokens, query)} of hits")
        client = ("", f"a change of the client: {mend.how}", "nothing of the server")
        rows.append((False, mend.gain_tokens, row(mend, *words, *client, *("", "") * bool(commands))))
    for remedy in helping(replayed):
        words = (remedy.change, brings(remedy, replayed))
        server = (
            remedy.cause,
            remedy.cost or "nothing",
            needs(remedy),
            *(commands(remedy) if commands else ()),
        )
        rows.append((stock and not flags_only(remedy), remedy.gain_tokens, row(remedy, *words, *server)))
    rows.sort(key=lambda ranked: (ranked[0], -ranked[1]))
    heads = (*HELPS, *((Column("to measure it", rank=5), Column("to serve it", rank=6)) if commands else ()))
    return grid(heads, (cells for _, _, cells in rows), "What helps, each replayed").filled()


def text_section(account: TextAccount) -> Section:
    groups = [group for group in account.groups if _is_shown(group, account)]
    tables = [] if account.engine else [_tokens(account)]  # of an engine, the causes are told already
    tables += [_groups(groups, account)] if groups else []
    tables += [_examples(groups)] if account.with_text and groups else []
    mends = {group.title: group.mend for group in groups}
    notes = [f"{title}: {mend}" for title, mend in mends.items()]
    if small := len(account.groups) - len(groups):
        differences = "difference" if small == 1 else "differences"
        left_out = f"{count(small)} more {differences} under 1 % of the {account.unit} each"
        notes.append(f"{left_out}: --json lists them.")
    notes += _by_server(account)
    lead = _lead(account)
    return Section(
        id="text",
        title="The text that breaks the prefix",
        lead=lead,
        tables=tuple(tables),
        notes=tuple(notes),
    )


def _by_server(account: TextAccount) -> Iterator[str]:
    """Say what the server does to prompts by itself, where that may break a prefix."""
    by_kind: dict[str, list[ByServer]] = {}
    for each in account.by_server:
        by_kind.setdefault(each.kind, []).append(each)
    for kind, places in by_kind.items():
        prompts = sum(place.requests for place in places)
        changes = len(places) > 1 or prompts < account.requests
        if kind in BY_SERVER and (changes or kind in ALWAYS):
            where = ", ".join(f"{place.where} in {count(place.requests)}" for place in places if place.where)
            where = f" ({where})" if where else ""
            yield f"The server itself, in {count(prompts)} prompts: {BY_SERVER[kind]}{where}"


def _is_shown(group: TextGroup, account: TextAccount) -> bool:
    return group.tokens_after >= LEAST_SHARE * account.query_tokens


def _lead(account: TextAccount) -> str:
    tokens, unit = account.misses.get("diverged", 0), account.unit
    if not account.groups:
        lead = f"No prompt of {count(account.requests)} agrees with an earlier one after a difference to it."
    else:
        lead = (
            f"{count(tokens)} {unit} ({percent(tokens, account.query_tokens)} of {count(account.requests)} prompts) "
            "stand in an earlier prompt, too, after a text that differs."
        )
        if whole := account.mended_query_tokens:
            gain = 100 * (account.mended_hit_tokens / whole - account.hit_tokens / account.query_tokens)
            lead += (
                f" With that text after the shared part, a replay's hit rate changes by {gain:+.1f} points."
            )
    if account.with_text and any(_is_shown(group, account) for group in account.groups):
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
    instance = Column("for instance", right=False, folds=True, rank=4, least=12)
    rows = (
        {
            Column("what differs", folds=True, least=16): group.title,
            Column("where", right=False, folds=True, least=12, rank=3): _where(group),
            "requests": count(group.requests),
            Column(f"from {account.unit[:-1]}", rank=2): count(group.at),
            "known after it": count(group.tokens_after),
            Column("share", rank=1): percent(group.tokens_after, account.query_tokens),
            "mended alone": _gain(group.hit_tokens, group, account),
            "with all before it": _gain(group.with_before_hit_tokens, group, account),
            instance: f"{group.request} differs from {group.like}",
        }
        for group in groups
    )
    return grid_of(rows, f"Differences by kind and place, in {account.unit}").filled()


def _where(group: TextGroup) -> str:
    line = f" line {count(group.line)}" if group.line and not group.place.startswith("a ") else ""
    label = f", after {printable(group.label)}" if group.label else ""
    return f"{printable(group.place)}{line}{label}" if group.place else "–"


def _gain(hits: int, group: TextGroup, account: TextAccount) -> str:
    if not group.query_tokens:
        return "–"
    return f"{100 * (hits / group.query_tokens - account.hit_tokens / account.query_tokens):+.1f} points"


def _examples(groups: Sequence[TextGroup]) -> Grid:
    """Return two prompts each, one above the other, with « » around the part that differs."""
    rows = (
        {
            Column("two prompts", folds=True, least=16): name,
            Column("of", right=False, folds=True): request,
            Column("prompt", right=False, folds=True): printable(
                f"{group.before[-CONTEXT:]}«{_short(text)}»{group.after[:CONTEXT]}".translate(_ESCAPES)
            ),
        }
        for group in groups
        for name, request, text in ((group.title, group.like, group.old), ("", group.request, group.new))
    )
    return grid_of(rows, "Two prompts each, « » around what differs")


def _short(text: str) -> str:
    return text if len(text) <= MOST else f"{text[: MOST // 2]} .. {text[-MOST // 2 :]}"
