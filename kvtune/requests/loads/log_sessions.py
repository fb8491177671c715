"""Finds the sessions of a log: a request whose prompt begins with the whole prompt of an earlier one continues it.

A request waits for those of its session that had been answered when it was sent and that no other waits for. A prompt
that repeats an earlier one without going on, or only its first part, begins another session.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from kvtune.base.errors import UsageError
from kvtune.requests.loads.sessions import Node, Session, cut
from kvtune.requests.loads.trace_file import Rows
from kvtune.requests.loads.trace_rows import MOONCAKE_BLOCK
from kvtune.requests.log.logged import Logged
from kvtune.requests.log.token_ids import Prefixes, packed
from kvtune.requests.types import Span

NO_ENDS = "the log does not say when answers ended: pauses last from sending to sending, answers included"

ALONE = (
    "no prompt goes on from an earlier one: each request is a session of its own, and pauses are not known"
)


class At(NamedTuple):
    """A request: the number of its session, and its own in it."""

    session: int
    node: int


@dataclass(slots=True)
class _Known:
    """A session so far. `open`: requests that no other waits for. `shared`: first tokens that other sessions have."""

    name: str
    begun_s: float
    first: tuple[Span, ...]
    nodes: list[Node] = field(default_factory=list)
    ends_s: list[float] = field(default_factory=list)
    open: list[int] = field(default_factory=list)
    shared: int = 0


class Recogniser:
    """Sorts requests into sessions. They are added in the order in which they were sent."""

    def __init__(self) -> None:
        self._known: list[_Known] = []

    def add(
        self, name: str, tokens: int, output: int, sent_s: float, ended_s: float, shared: int, like: At | None
    ) -> At:
        """Add a request; return its place. `shared`: its first tokens that `like`, the first with them, has, too."""
        if like is None or not self._continues(tokens, shared, like):
            first = cut(self._known[like.session].first, shared) if like is not None else ()
            if like is not None:
                earlier = self._known[like.session]
                earlier.shared = max(earlier.shared, shared)
            have = sum(span.length for span in first)
            begun = _Known(name, sent_s, (*first, Span(len(self._known), have, tokens - have)), shared=have)
            self._known.append(begun)
            place = At(len(self._known) - 1, 0)
            self._append(begun, Node(tokens, output), sent_s, ended_s)
            return place
        session = self._known[like.session]
        before = session.nodes[like.node]
        common = min(shared, before.tokens + before.output)
        place = At(like.session, len(session.nodes))
        self._append(session, Node(tokens, output, parent=like.node, common=common), sent_s, ended_s)
        return place

    def sessions(self) -> tuple[Session, ...]:
        return tuple(
            Session(
                session.name,
                (
                    Node(
                        session.nodes[0].tokens,
                        session.nodes[0].output,
                        head=cut(session.first, session.shared),
                    ),
                    *session.nodes[1:],
                ),
                session.begun_s,
            )
            for session in self._known
        )

    def _continues(self, tokens: int, shared: int, like: At) -> bool:
        """Whether a prompt begins with the whole prompt of a request of this session, and goes on."""
        nodes = self._known[like.session].nodes
        parent = like.node
        while parent >= 0 and nodes[parent].tokens > shared:
            parent = nodes[parent].parent
        return parent >= 0 and nodes[parent].tokens < tokens

    def _append(self, session: _Known, node: Node, sent_s: float, ended_s: float) -> None:
        """Append a request to a session, with what it waits for."""
        after = [node for node in session.open if session.ends_s[node] <= sent_s]
        if not after:
            ended = [node for node, end_s in enumerate(session.ends_s) if end_s <= sent_s]
            after = [max(ended, key=lambda node: session.ends_s[node])] if ended else []
        since_s = max((session.ends_s[node] for node in after), default=session.begun_s)
        session.open = [node for node in session.open if node not in after] + [len(session.nodes)]
        session.nodes.append(
            Node(node.tokens, node.output, tuple(after), round(sent_s - since_s, 6), node.parent, node.common)
        )
        session.ends_s.append(ended_s)


def log_sessions(file: Path, rows: Sequence[Logged]) -> tuple[tuple[Session, ...], str]:
    """Return the sessions of a log's requests, exact to the token, and what the log does not say."""
    unknown = next((row for row in rows if row.t0 is None), None)
    if unknown is not None:
        raise UsageError(
            f"{file}, line {unknown.line}: no time of sending (t0), so the pauses of its session are unknown",
            "log t0 and t1 of each request; docs/logs.md shows them",
        )
    begun_s = rows[0].t0 or 0.0
    recogniser = Recogniser()
    salts: dict[str, Prefixes[At]] = {}
    for row in rows:
        sent_s = row.t0 or 0.0
        if row.t1 is not None and row.t1 < sent_s:
            raise UsageError(
                f"{file}, line {row.line}: answered (t1={row.t1:.12g}) before it was sent (t0={sent_s:.12g})",
                "log both by one clock",
            )
        tokens = packed(row.prompt)
        prefixes = salts.setdefault(row.salt, Prefixes())
        shared, like = prefixes.longest(tokens)
        ended_s = row.t1 if row.t1 is not None else sent_s
        place = recogniser.add(
            row.name,
            len(row.prompt),
            max(1, row.output_tokens),
            sent_s - begun_s,
            ended_s - begun_s,
            shared,
            like,
        )
        prefixes.add(tokens + packed(row.answer), place)
    notes = [] if all(row.t1 is not None for row in rows) else [NO_ENDS]
    sessions = recogniser.sessions()
    if len(sessions) == len(rows) > 1:
        notes.append(ALONE)
    if silent := sum(not row.answer for row in rows):
        notes.append(
            f"{silent:,} of {len(rows):,} answers have no token ids: they count as new text in the next turn"
        )
    return sessions, "; ".join(notes)


def trace_sessions(file: Path, rows: Rows, lacks: Sequence[str]) -> tuple[tuple[Session, ...], str]:
    """Return the sessions of a trace with hash ids of prefixes, and what such a trace does not say.

    A prompt that goes on where an earlier one ended is taken to hold its last, unfinished block and its answer.
    """
    recogniser = Recogniser()
    first: dict[int, At] = {}
    lengths: dict[At, tuple[int, int]] = {}
    last: dict[int, At] = {}  # the last full block of a prompt -> the last request with it
    for since, row in rows:
        if not row.streams:
            raise UsageError(
                f"{file} has no hash ids: which prompts continue which is unknown",
                "give a trace in Mooncake's format",
            )
        full = row.streams[: row.prompt // MOONCAKE_BLOCK]
        shared_ids = _known(full, first)
        shared, like = shared_ids * MOONCAKE_BLOCK, first[full[shared_ids - 1]] if shared_ids else None
        before = last.get(full[shared_ids - 1]) if shared_ids else None
        if before is not None and (whole := lengths[before])[0] < row.prompt:
            like, shared = before, min(sum(whole), row.prompt)
            if shared < sum(whole):
                shared = whole[0]
        output = max(row.output, 1)
        place = recogniser.add(f"line-{row.line}", row.prompt, output, since, since, shared, like)
        lengths[place] = (row.prompt, output)
        for hash_id in full[shared_ids:]:
            first[hash_id] = place
        if full:
            last[full[-1]] = place
    notes = [NO_ENDS, f"prefixes are known to {MOONCAKE_BLOCK} tokens", *lacks]
    sessions = recogniser.sessions()
    if len(sessions) == len(lengths) > 1:
        notes.append(ALONE)
    return sessions, "; ".join(notes)


def _known(ids: Sequence[int], first: dict[int, At]) -> int:
    return next((number for number, hash_id in enumerate(ids) if hash_id not in first), len(ids))
