"""The same requests through `tap`, `record`, `watch` and `explain-log`: the same hits and causes, or one says unknown.

A server is played: a prefix cache of one group with salts, evictions and resets, which publishes its events. Sessions
are drawn: prompts that grow, that are edited in each way, several at once, answers of which the ids are not known.
"""

from __future__ import annotations

import json
import random
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from kvtune.answers.explain.log import read
from kvtune.requests.loads.requests_file import selected
from kvtune.requests.log.logged import Logged, line_of
from kvtune.servers.tap import joining, judging
from kvtune.servers.tap.judging import Judging, Request
from kvtune.servers.tap.messages import Settings
from kvtune.servers.watch.account import Account
from kvtune.servers.watch.events import Batch, Cleared, Received, Removed, Source, Stored
from kvtune.servers.watch.metrics import Scrape
from tests.servers.watch.joined import join
from tests.servers.watch.played import Stream, Unconnected

LOST = ("reset", "evicted", "not_retained", "not_cached")
"""Causes of what was computed before and is gone: a log alone does not tell them apart."""
NEW = ("cold", "diverged")
VAGUE = ("unknown", "tails")
TEMPLATE = list(range(1000, 1040))
EDITS = (*["grow"] * 3, "again", "change", "insert", "remove", "move", "stamp", "cut", "salt", "two")
Causes = dict[str, int]


@dataclass
class Sent:
    name: str
    prompt: list[int]
    answer: list[int]
    salt: str
    t0: float
    first: float
    t1: float
    told: bool
    """Whether the log has the answer's ids."""
    hit: int = 0
    seen: int = 0
    """First tokens that a prompt of its salt had computed before it was looked up."""


@dataclass
class Server:
    """`capacity`: blocks. A block's key is its salt and all tokens up to its end."""

    size: int
    capacity: int
    batches: list[Batch] = field(default_factory=list)
    names: dict[tuple[str, tuple[int, ...]], int] = field(default_factory=dict)
    copies: OrderedDict[tuple[str, tuple[int, ...]], int] = field(default_factory=OrderedDict)
    computed: list[tuple[str, list[int]]] = field(default_factory=list)

    def keys(self, tokens: Sequence[int], salt: str) -> list[tuple[str, tuple[int, ...]]]:
        ends = range(self.size, len(tokens) + 1, self.size)
        return [(salt, tuple(tokens[:end])) for end in ends]

    def compute(self, one: Sent, at: float) -> None:
        keys = self.keys(one.prompt, one.salt)
        held = next((n for n, key in enumerate(keys) if key not in self.copies), len(keys))
        hit = min(held, (len(one.prompt) - 1) // self.size)
        one.hit = hit * self.size
        one.seen = max(
            (_agree(one.prompt, text) for salt, text in self.computed if salt == one.salt), default=0
        )
        self._store(one, keys, hit, at)
        self.computed.append((one.salt, one.prompt))

    def answer(self, one: Sent, at: float) -> None:
        whole = [*one.prompt, *one.answer[:-1]]
        self._store(one, self.keys(whole, one.salt), len(one.prompt) // self.size, at)
        self.computed.append((one.salt, whole))

    def _store(self, one: Sent, keys: list[tuple[str, tuple[int, ...]]], first: int, at: float) -> None:
        for key in keys[:first][::-1]:
            self.copies.move_to_end(key) if key in self.copies else None
        gone: list[int] = []
        for key in keys[first:]:
            if key not in self.copies and len(self.copies) >= self.capacity:
                victim = next(old for old in self.copies if old not in keys)
                gone += [self.names[victim]] * self.copies.pop(victim)
            self.copies[key] = self.copies.get(key, 0) + 1
            self.names.setdefault(key, len(self.names) + 1)
        events: list[Any] = [Removed(gone, "GPU", 0)] if gone else []
        if keys[first:]:
            names = [self.names[key] for key in keys[first:]]
            tokens = list(keys[-1][1][first * self.size :])
            parent = self.names[keys[first - 1]] if first else None
            extra = [[one.salt] if one.salt and not first else None, *[None] * (len(names) - 1)]
            stored = Stored(names, tokens, self.size, parent, None, "GPU", extra, 0, session_id=one.name)
            events.append(stored)
        self.batches += [Batch(at, events)] if events else []

    def reset(self, at: float) -> None:
        self.copies.clear()
        self.batches.append(Batch(at, [Cleared()]))


def _agree(one: Sequence[int], other: Sequence[int]) -> int:
    return next(
        (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


@dataclass
class Session:
    """What a server did for drawn requests. `late`: the number of the first request that a late tap sees."""

    server: Server
    sent: list[Sent]
    late: int
    alone: bool
    """Whether no two requests ran at once."""

    @property
    def exact(self) -> bool:
        """Whether a log tells what the server computed, in what order, and hits are of single tokens, as in bounds."""
        return self.alone and self.server.size == 1 and all(one.told for one in self.sent)

    @property
    def received(self) -> list[Received]:
        return [Received(0, batch) for batch in self.server.batches]


def drawn(seed: int) -> Session:
    draw = random.Random(seed)
    size = draw.choice((1, 4, 8, 16))
    server = Server(size, draw.choice((700 // size, 1500 // size, 1 << 20)))
    alone = draw.random() < 0.5
    sent: list[Sent] = []
    now, all_told = 100.0, draw.random() < 0.5
    for number in range(draw.randrange(3, 14)):
        now += draw.uniform(0.5, 2.0) if alone else draw.uniform(0.0, 0.4)
        known = [one for one in sent if one.t1 < now]
        prompt, salt = _prompt(draw, known, sent)
        answer = _words(draw, draw.randrange(1, 40))
        first = now + draw.uniform(0.01, 0.02)
        t1 = first + draw.uniform(0.02, 0.1 if alone else 1.5)
        told = all_told or draw.random() < 0.5
        sent.append(Sent(f"kvtune-t-{number}", prompt, answer, salt, now, first, t1, told))
    moments: list[tuple[float, str, Sent | None]] = []
    for one in sent:
        moments += [(one.t0 + 0.001, "compute", one), (one.t1 - 0.0005, "answer", one)]
    moments += [(draw.uniform(100.0, now), "reset", None)] if draw.random() < 0.3 else []
    for at, kind, what in sorted(moments, key=lambda moment: moment[0]):
        if what is None:
            server.reset(at)
        elif kind == "compute":
            server.compute(what, at)
        else:
            server.answer(what, at)
    return Session(server, sent, draw.randrange(1, len(sent)), alone)


def _words(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(2000, 60000) for _ in range(count)]


def _prompt(draw: random.Random, known: list[Sent], sent: list[Sent]) -> tuple[list[int], str]:
    """A new prompt, or one of the latest with an edit."""
    near = (known or sent)[-4:]
    if not near or draw.random() < 0.1:
        return [*(TEMPLATE if draw.random() < 0.7 else []), *_words(draw, draw.randrange(20, 260))], ""
    one = draw.choice(near)
    text, salt = list(one.prompt), one.salt
    at, end = sorted(draw.randrange(len(text)) for _ in range(2))
    edit = draw.choice(EDITS)
    if edit == "grow":
        text += [*(one.answer if one in known else []), *_words(draw, draw.randrange(1, 60))]
    elif edit == "change":
        text[at] += 1
    elif edit == "insert":
        text[at:at] = _words(draw, draw.randrange(1, 20))
    elif edit == "remove":
        del text[at:end]
    elif edit == "move":
        text = [*text[end:], *text[at:end], *text[:at]]
    elif edit == "stamp":
        text[: min(9, len(text))] = _words(draw, 9)
    elif edit == "cut":
        text = text[: max(1, end)]
    elif edit == "salt":
        salt = draw.choice(("", "a", "b"))
    elif edit == "two":
        text[at], text[end] = text[at] + 1, text[end] + 1
    return text[:400] or [7], salt


class PlayedServer(Unconnected):
    """In place of `Server` of a tap. `queries`: prompt tokens that it had computed before; None: it is down."""

    queries = 0
    size = 16
    publishes = True

    def __init__(self, *_: object) -> None:
        super().__init__()

    def scrape(self) -> Scrape:
        values = {"prefix_cache_queries": float(self.queries)}
        return Scrape(0.0, values, {}, cache={"block_size": str(self.size)}, started=1.0)

    def event_sources(self) -> dict[int, Source]:
        return self.sources if self.publishes else {}


class PlayedReader(Unconnected):
    complete = True

    def __init__(self, *_: object) -> None:
        super().__init__()
        self.streams = {0: Stream(whole=self.complete)}

    def start(self) -> PlayedReader:
        return self

    def stop(self, why: str) -> None:
        raise AssertionError(why)


@dataclass
class Lines:
    """What a tap says: of each request its causes and its line of the log."""

    causes: dict[str, Causes]
    rows: list[dict[str, Any]]
    hits: dict[str, int]


def tapped(
    session: Session,
    sent: Sequence[Sent],
    batches: Sequence[Batch] | None,
    *,
    fresh: bool,
    usage: bool = True,
) -> Lines:
    """Play requests through a tap's judge, in the order in which its relay and its reader tell of them."""
    draw = random.Random(len(sent))
    PlayedServer.queries, PlayedServer.size = 0 if fresh else 1000, session.server.size
    PlayedServer.publishes = batches is not None
    judge = Judging(Settings(PlayedServer.base, {}, False, "kvtune-t-", "", False, False), print)
    requests = {one.name: _request(number, one) for number, one in enumerate(sent)}
    moments: list[tuple[float, str, Any]] = []
    for one in sent:
        moments += [(one.t0, "opened", one), (one.first, "begun", one), (one.t1, "ended", one)]
        moments.append((one.t1 + 0.3, "closed", one))
    late = 0.0
    for batch in batches or ():
        late = max(late, batch.ts + draw.uniform(0.0, 0.2))
        moments.append((late, "batch", batch))
    lines = Lines({}, [], {})
    for _, kind, what in sorted(moments, key=lambda moment: moment[0]):
        if kind == "batch":
            judge.add([Received(0, what)])
            continue
        request = requests[what.name]
        if kind == "opened":
            judge.opened(request)
        elif kind == "begun":
            judge.begun(request)
        elif kind == "ended":
            request.row = replace(
                request.row,
                ttft=what.first - what.t0,
                t1=what.t1,
                hit=what.hit if usage else -1,
                output_tokens=len(what.answer),
                answer=what.answer if what.told else (),
            )
            judge.ended(request)
        else:
            judge.closed(request)
            hit, causes = (request.tally.hit_tokens, request.tally.misses) if request.tally else (-1, {})
            lines.causes[what.name], lines.hits[what.name] = causes, hit
            lines.rows.append(_row(request, hit, request.by))
    judge.close()
    return lines


def _request(number: int, one: Sent) -> Request:
    row = Logged(one.name, one.prompt, t0=one.t0, salt=one.salt, session=one.name, output_tokens=-1, kind="c")
    return Request(number, "/v1/completions", {}, row)


def _row(one: Request, hit: int, by: str) -> dict[str, Any]:
    return line_of(replace(one.row, hit=hit), hit_by=by if by == "events" else None)


def logged(lines: Lines, folder: Path) -> list[Logged]:
    path = folder / "log.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines.rows))
    return sorted(selected(path, None), key=lambda one: one.t0 or 0.0)


def recorded(
    rows: Sequence[Logged],
    session: Session,
    received: Sequence[Received] | None,
    *,
    fresh: bool,
    complete: bool,
) -> dict[str, Causes]:
    account = Account(complete) if received is not None else None
    answered = join(received or (), rows, account, size=session.server.size, whole=fresh)
    return {one.asked.name: one.tally.misses if one.tally else {} for one in answered}


def merged(causes: Causes, *, texts: bool) -> Counter[str]:
    """Causes as one who has no events, or not `texts` all texts, tells them."""
    told: Counter[str] = Counter()
    for cause, tokens in causes.items():
        told["lost" if cause in LOST else "new" if cause in NEW and not texts else cause] += tokens
    return told


def agree(one: Causes, other: Causes, *, texts: bool = True) -> bool:
    """Whether two causes of a request are the same where neither of them is unknown."""
    ours, theirs = merged(one, texts=texts), merged(other, texts=texts)
    unknown = [sum(told[cause] for cause in VAGUE) for told in (ours, theirs)]
    return all(
        ours[cause] <= theirs[cause] + unknown[1] and theirs[cause] <= ours[cause] + unknown[0]
        for cause in {*ours, *theirs} - set(VAGUE)
    )


def hold(seed: int, folder: Path) -> Iterator[tuple[str, object]]:
    """Yield what does not hold for a drawn session."""
    session = drawn(seed)
    sent = session.sent
    PlayedReader.complete = True
    with_events = tapped(session, sent, session.server.batches, fresh=True)
    by_usage = tapped(session, sent, None, fresh=True)
    by_events = tapped(session, sent, session.server.batches, fresh=True, usage=False)
    rows = logged(with_events, folder)
    record = recorded(rows, session, session.received, fresh=True, complete=True)
    alone = recorded(rows, session, None, fresh=True, complete=False)
    first_seen = sent[session.late :]
    late = tapped(session, first_seen, session.server.batches, fresh=False)
    late_alone = tapped(session, first_seen, None, fresh=False)
    PlayedReader.complete = False
    since = [batch for batch in session.server.batches if batch.ts > first_seen[0].t0]
    joined = tapped(session, first_seen, since, fresh=False)
    log = read(rows, None)
    of_log = {
        one.name: edges.tally(len(one.prompt), min(edges.seen, len(one.prompt) - 1)).misses
        for one, edges in zip(rows, log.edges, strict=True)
    }
    for one in sent:
        name, prompt = one.name, len(one.prompt)
        ours = with_events.causes[name]
        if by_events.hits[name] != one.hit:
            yield f"{name}: hit by events", (by_events.hits[name], one.hit)
        for what, causes in (
            ("tap", ours),
            ("log", by_usage.causes[name]),
            ("events", by_events.causes[name]),
        ):
            if one.hit + sum(causes.values()) != prompt:
                yield f"{name}: sum of {what}", causes
            if sum(causes.get(cause, 0) for cause in NEW) > prompt - max(one.seen, one.hit):
                yield f"{name}: {what} calls new what was computed", (causes, one.seen)
        if ours != by_events.causes[name]:
            yield f"{name}: without usage", (ours, by_events.causes[name])
        if ours != record[name]:
            yield f"{name}: record", (ours, record[name])
        if by_usage.causes[name] != alone[name]:
            yield f"{name}: record without events", (by_usage.causes[name], alone[name])
        if not agree(ours, alone[name]):
            yield f"{name}: with and without events", (ours, alone[name])
        if session.exact and not agree(_new(alone[name]), _new(of_log[name])):
            yield f"{name}: explain-log", (alone[name], of_log[name])
    for one in first_seen:
        for what, causes in (("late", late), ("without history", joined), ("late, no events", late_alone)):
            told = causes.causes[one.name]
            if causes.hits[one.name] == one.hit and not agree(
                told, with_events.causes[one.name], texts=False
            ):
                yield f"{one.name}: {what}", (told, with_events.causes[one.name])
            if sum(told.get(cause, 0) for cause in NEW) > len(one.prompt) - max(one.seen, one.hit):
                yield f"{one.name}: {what} calls new what was computed", (told, one.seen)
    yield from _live(session, record)


def _new(causes: Causes) -> Causes:
    return {cause: tokens for cause, tokens in causes.items() if cause in (*NEW, *VAGUE, "other_salt")}


def _live(session: Session, record: dict[str, Causes]) -> Iterator[tuple[str, object]]:
    """What `watch` says of whole blocks is what the log says of them."""
    account = Account()
    for received in session.received:
        account.add(received)
    account.settle()
    sums: Counter[str] = Counter()
    for causes in record.values():
        sums.update(causes)
    if not session.alone:
        return
    for cause in ("reset", "evicted", "not_retained"):
        # Events do not tell where a prompt ends: its last block may be one that any hit leaves out.
        if account.tokens[cause] > sums[cause] + sums["last_token"] + account.tokens["answers"]:
            yield f"watch: {cause}", (account.tokens, sums)
    if account.tokens["cold"] > sum(sums[cause] for cause in (*NEW, *VAGUE)) + _answers(session):
        yield "watch: cold", (account.tokens, sums)


def _answers(session: Session) -> int:
    """Tokens of blocks that an answer fills: the server here stores them at once, and they look like a prompt's."""
    return sum(len(one.answer) + session.server.size for one in session.sent)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "Server", PlayedServer)
    monkeypatch.setattr(joining, "Reader", PlayedReader)


@pytest.mark.usefixtures("played")
@pytest.mark.parametrize("seeds", [range(40), pytest.param(range(40, 2040), marks=pytest.mark.full)])
def test_all_judges_of_the_same_requests_say_the_same_or_unknown(tmp_path: Path, seeds: range) -> None:
    assert [(seed, *what) for seed in seeds for what in hold(seed, tmp_path)][:5] == []
