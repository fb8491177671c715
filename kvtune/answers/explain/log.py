"""A log of requests: where prompts differ from earlier ones, and their hits if mended.

Mending a prompt moves the text that differs from an earlier prompt to the place after the text that both share.

In the CLI's process. In: the log, a renderer for its text, and how an engine is simulated. Out: a `TextAccount`, with
the texts of its examples; `without_text` takes these out before the account is stored or passed on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from kvtune.answers.explain.explanation import Bench, Explanation, explained, measured_requests
from kvtune.base.errors import KvtuneError
from kvtune.base.files import creating
from kvtune.base.files import explained as explaining
from kvtune.base.scratch import scratch
from kvtune.base.units import count
from kvtune.data.causes import OF_TEXT
from kvtune.data.run.extras import ByServer, TextAccount, TextGroup
from kvtune.data.run.types import Run, hits_of
from kvtune.data.tally import Edges, Hits, Tally
from kvtune.lab.setup.setup import Setup
from kvtune.requests.loads.requests_file import selected
from kvtune.requests.loads.spec import build
from kvtune.requests.log.bodies import REMINDER, Note
from kvtune.requests.log.logged import Logged, encoded, line_of
from kvtune.requests.log.requests_log import Render
from kvtune.requests.text.changes import Both, Change, changes_of
from kvtune.requests.text.decoded import CLOSING, Decoded, Decoder, TextOf, closing
from kvtune.requests.text.divergence import Divergence
from kvtune.requests.text.earlier import Earlier, in_order
from kvtune.requests.text.groups import Group, Grouped, grouped, place_of
from kvtune.requests.text.kinds import KINDS
from kvtune.requests.text.mending import mended

KEPT = 64
"""Decoded texts that are kept: most prompts differ from one of the latest."""
CONTEXT = 160
"""Characters of an example's text before an edit, and after it."""


class TextAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What `kvtune explain-log` answers without a replay: its `--json`."""

    schema: int = 1
    texts: TextAccount


Answer = TypeVar("Answer", bound=Explanation | TextAnswer)


@dataclass(frozen=True)
class TextLog:
    """A log's requests in a workload's order. `unit`: of all counts, "tokens" or "bytes".

    `edges`: what earlier prompts had of each request's. `divergences`, `changes`: the differences, and the edits of
    each, by request number. `decoder`: of the tokens; None if their text is not known.
    """

    rows: Sequence[Logged]
    edges: Sequence[Edges]
    divergences: dict[int, Divergence]
    changes: dict[int, tuple[Change, ...]]
    grouped: Grouped
    unit: str
    decoder: Decoder | None = None

    @property
    def groups(self) -> tuple[Group, ...]:
        return self.grouped.groups

    @property
    def timed(self) -> bool:
        """Whether it says of each request when it was sent and answered."""
        return all(row.t0 is not None and row.t1 is not None for row in self.rows)

    @cached_property
    def _ends(self) -> dict[int, int]:
        """How many tokens of each prompt come after its last message."""
        if self.decoder is None:
            return {}
        lasts = (self.decoder.decoded(row.prompt[-CLOSING:]) for row in self.rows)
        return {number: closing(last) for number, last in enumerate(lasts)}

    def mended(self, groups: Sequence[Group]) -> list[Logged]:
        """Return the requests, with these groups mended in all prompts."""
        texts = ((row.prompt, row.answer) for row in self.rows)
        chosen = self.grouped.chosen(groups)
        prompts = mended(texts, self.divergences, self.changes, chosen, self._ends)
        return [
            replace(row, prompt=prompt.tolist(), hit=-1, ttft=None)
            for row, prompt in zip(self.rows, prompts, strict=True)
        ]


def read(rows: Sequence[Logged], text: TextOf | None, *, bytes_: bool = False) -> TextLog:
    """Compare the prompt of each request with the earlier ones; `rows` are in the order in which they are sent."""
    edges: list[Edges] = []
    divergent: list[tuple[Divergence, tuple[Change, ...]]] = []
    decoder = Decoder(text) if text is not None else None
    decoded = lru_cache(KEPT)(partial(_decoded, rows, decoder)) if decoder is not None else None
    for number, earlier in enumerate(in_order(rows, Earlier(bytes_=bytes_))):
        # A log is all that is known here: what is in none of its prompts counts as not seen.
        edges.append(replace(earlier.edges, seen=earlier.shared, untold=0, whole=True))
        if (divergence := earlier.differs) is not None:
            both = Both(decoded(divergence.like), decoded(number)) if decoded is not None else None
            if changed := changes_of(divergence, both):
                divergent.append((divergence, changed))
    divergences = {divergence.request: divergence for divergence, _ in divergent}
    changes = {divergence.request: some for divergence, some in divergent}
    unit = "bytes" if bytes_ else "tokens"
    return TextLog(rows, edges, divergences, changes, grouped(divergent), unit, decoder)


def _decoded(rows: Sequence[Logged], decoder: Decoder, number: int) -> Decoded:
    """Return the text of a request's prompt and answer."""
    row = rows[number]
    return decoder.decoded([*row.prompt, *row.answer[:-1]])


def as_logged(run: Run, log: TextLog, *, compared: bool) -> Run:
    """Return a replay's run with the times of the log, and with the hits that the log's server reported.

    Unless `compared`, or if the log does not have each request's hit, hits are unknown: the replay is then not
    compared with the server.
    """
    table = run.table("requests")
    hits = np.array([row.hit for row in log.rows])
    logged = {**table, "hit_tokens": hits if compared and (hits >= 0).all() else np.full(len(hits), -1)}
    if log.timed:
        sent = np.array([row.t0 for row in log.rows], dtype="f8")
        logged |= {
            "sent_s": sent - sent[0],
            "first_token_s": sent - sent[0] + np.array([row.ttft or np.nan for row in log.rows]),
            "finished_s": np.array([row.t1 for row in log.rows], dtype="f8") - sent[0],
        }
    return Run(run.header, {**run.tables, "requests": logged})


def of_run(run: Run, trace: Path, render: Render | None, text: TextOf | None, *, bytes_: bool) -> TextLog:
    """Return the log that was a run's workload, with only those requests that were sent."""
    params = run.header.workload.params
    rows = selected(
        trace,
        render,
        limit=int(params.get("limit", 0)),
        since=float(params.get("since", 0)),
        until=float(params.get("until", 0)),
    )
    return read(rows[: len(run.table("requests")["id"])], text, bytes_=bytes_)


OF_BOUNDS = ("hit", "cold", *OF_TEXT, "last_token")
"""What a cache that keeps everything has of each prompt; other causes need a replay."""


def bounds_of(log: TextLog) -> TextAccount:
    """Count the hits of a cache that keeps everything. The last token of a prompt is always a miss."""
    lengths = ((len(row.prompt), edges) for row, edges in zip(log.rows, log.edges, strict=True))
    tallies = (edges.tally(prompt, min(edges.seen, prompt - 1)) for prompt, edges in lengths)
    return _account(log, Tally.sum(tallies, OF_BOUNDS[1:]), engine=False)


def explained_log(bench: Bench, log: TextLog, tries: int) -> Explanation:
    """Explain an exact replay of vLLM's cache, with the log's texts and what mending them brings."""
    explanation = explained(bench, tries)
    account = with_gains(explanation, log, bench, tries)
    return msgspec.structs.replace(explanation, texts=account)


def with_gains(explanation: Explanation, log: TextLog, bench: Bench, tries: int) -> TextAccount:
    """Return the hits and misses in an exact replay of vLLM's cache, and what mending the log's texts brings.

    The log is replayed with all its groups mended; with each of the `tries` largest alone, and with all before it.
    """
    account = _account(log, Tally.sum([explanation.prefix_cache]), engine=True)
    if not log.groups or not tries:
        return account
    alone = [(group,) for group in log.groups[:tries]]
    up_to = [log.grouped.up_to(group) for group in log.groups[:tries]]
    chosen = list(dict.fromkeys([log.groups, *alone, *up_to]))
    bench.view.phase(f"replaying {count(len(chosen))} mended {'log' if len(chosen) == 1 else 'logs'}")
    got: dict[tuple[Group, ...], Hits] = {}
    with scratch("mended") as folder:
        outcomes = bench.outcomes(_with_log(bench.setup, log.mended(groups), folder) for groups in chosen)
        for groups, outcome in zip(chosen, outcomes, strict=True):
            if isinstance(outcome, KvtuneError):
                raise outcome
            got[groups] = hits_of(outcome.table("requests"), measured_requests(bench.run))
    changed = [
        msgspec.structs.replace(
            group,
            hit_tokens=got[single].hit_tokens,
            query_tokens=got[single].query_tokens,
            with_before_hit_tokens=got[all_].hit_tokens,
        )
        for group, single, all_ in zip(account.groups, alone, up_to, strict=False)
    ]
    return msgspec.structs.replace(
        account,
        mended_hit_tokens=got[log.groups].hit_tokens,
        mended_query_tokens=got[log.groups].query_tokens,
        groups=[*changed, *account.groups[len(changed) :]],
    )


def _with_log(setup: Setup, rows: Sequence[Logged], folder: Path) -> Setup:
    """Return the set-up with these requests, which a new file in the folder holds, sent as its load's are."""
    sent, file = setup.load.built(), folder / f"{len(list(folder.iterdir()))}.jsonl"
    write_log(file, rows)
    keys = f"concurrency={sent.concurrency or 0},speed={sent.params['speed']!r}"
    return setup.with_load(build(f"requests:path={file},{keys}", seed=sent.seed))


def write_log(file: Path, rows: Sequence[Logged]) -> None:
    """Write a new log of token ids, which every command takes as a workload. Only this user can read it."""
    with (
        explaining(file, "name a new file in a folder that you may write to, or free space", "the log"),
        creating(file, private=True) as stream,
    ):
        for row in rows:
            stream.write(encoded(line_of(row)))


def without_text(account: TextAccount) -> TextAccount:
    """Return the account without its examples' texts, for files and JSON."""
    nothing = dict.fromkeys(("before", "old", "new", "after", "label"), "")
    groups = [msgspec.structs.replace(group, **nothing) for group in account.groups]
    return msgspec.structs.replace(account, groups=groups, with_text=False)


def for_others(answer: Answer) -> Answer:
    """Return the answer as it is passed on or stored: without its examples' texts."""
    return (
        answer if answer.texts is None else msgspec.structs.replace(answer, texts=without_text(answer.texts))
    )


def _account(log: TextLog, tally: Tally, *, engine: bool) -> TextAccount:
    return TextAccount(
        unit=log.unit,
        engine=engine,
        requests=len(log.rows),
        **msgspec.structs.asdict(tally),
        groups=[_group(group, log) for group in log.groups],
        with_text=True,
        rendered_by=", ".join(sorted({row.how for row in log.rows if row.how})),
        by_server=_by_server(log.rows),
    )


def _by_server(rows: Sequence[Logged]) -> list[ByServer]:
    """Count what the server did to prompts by itself. The places of reminders are not told apart."""
    notes = Counter(
        note
        for row in rows
        for note in {Note(kind, "" if kind == REMINDER else where) for kind, where in row.notes}
    )
    return [ByServer(kind=kind, where=where, requests=n) for (kind, where), n in sorted(notes.items())]


def _group(group: Group, log: TextLog) -> TextGroup:
    divergence, change = group.example
    edit = change.edit
    decoder = log.decoder
    text = _decoded(log.rows, decoder, divergence.request).text if decoder is not None else ""
    start, end = edit.new_span
    line = text.rfind("\n", 0, start) + 1
    before = text[max(0, line if line < start else start - CONTEXT, start - CONTEXT) : start]
    after = text[end : end + CONTEXT].partition("\n")[0]
    return TextGroup(
        kind=edit.kind,
        title=KINDS[edit.kind].title,
        mend=KINDS[edit.kind].mend,
        place=place_of(change),
        line=edit.line,
        label=edit.label,
        at=group.at,
        requests=len(group.requests),
        tokens_after=group.after,
        request=log.rows[divergence.request].name,
        like=log.rows[divergence.like].name,
        before=before,
        old=edit.old,
        new=edit.new,
        after=after,
    )
