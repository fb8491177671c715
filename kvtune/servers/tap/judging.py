"""Judges each request: its hit, the causes of its misses, the earlier prompt that it differs from, its session.

In: requests in order of time (`opened` when sent, `begun` at the first token, `ended` when answered, `dropped`
without an answer), and the server's KV events, if it publishes any. Out: what `kvtune/servers/watch/requests.py`
judges of each, and the text that differs.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, count, islice
from typing import Any, TypeVar

from kvtune.base.bounded import TooLongError, cpu_limit
from kvtune.base.errors import KvtuneError
from kvtune.data.tally import Tally
from kvtune.requests.log.logged import Logged
from kvtune.requests.log.token_ids import agreeing, packed
from kvtune.requests.text.changes import MERGED
from kvtune.requests.text.divergence import Divergence
from kvtune.requests.text.edits import Edit, edits, stripped
from kvtune.requests.text.kinds import JUDGED, masked
from kvtune.servers.tap.joining import LATE_S, Joining
from kvtune.servers.tap.limits import REQUEST_S, Latest
from kvtune.servers.tap.messages import Settings
from kvtune.servers.watch.cache import Cache
from kvtune.servers.watch.endpoints import Named
from kvtune.servers.watch.events import Received
from kvtune.servers.watch.metrics import Scrape, begun_anew
from kvtune.servers.watch.requests import Requests
from kvtune.servers.watch.server import Server

Result = TypeVar("Result")
USUAL_BLOCK = 16
"""vLLM's block size where the server does not say it."""
MOST_TOKENS = 16 << 20
"""Most tokens of earlier prompts that are remembered. Beyond that all are forgotten, and what none had is unknown."""
MOST_SESSIONS = 10_000
MOST_NEAR = 4
"""The client's newest sessions of which a request may be a changed one."""
FEWEST = 3
"""Messages that a session must have for that, or to be gone on with under another system text: two sessions, and two
applications, may begin with the same question."""
AKIN = 0.5
"""Least share of three words in a row that the system texts of one application have in common."""
MOST_PIECES = 3
"""Edits of no kind by which another session's prompt may differ, such as a form that is filled."""
UNTOLD = ("other", "line_added", "line_removed")
MOST_REMEMBERED = 200
"""Requests whose text is remembered."""
AGAIN_S = 30.0
"""Shortest time in seconds between two questions for KV events, of a server that publishes none."""
ASK_S = 1.0
"""Shortest time in seconds between two questions whether the server was restarted."""


@dataclass(slots=True)
class Request:
    """One prompt of a request. `row`: what is recorded of it. `reported`: all prompt tokens that the server counted.

    At its end: `tally`, None: its hit is not known; `by`: who counted it; `status`, `how`, `error`: of its answer.
    """

    number: int
    api: str
    body: Mapping[str, Any]
    row: Logged
    reported: int = -1
    group: str = ""
    """Its session: requests whose messages grow one from another."""
    place: int = -1
    """Its number for the judge; -1: it does not judge it."""
    before: int = -1
    """The place of the request before it in its session; -1: none."""
    differs: Differs | None = None
    part: int = 0
    """Which prompt of a request with several it is, from 1."""
    trouble: str = ""
    """Why it was not analysed, or only in part."""
    lost_before: tuple[float, int] | None = None
    """What of the events was lost when it was sent (`Joining.lost`); None: they were not heard."""
    tally: Tally | None = None
    by: str = ""
    status: int = 0
    how: str = "whole"
    error: str = ""
    why: str = ""
    """Why its token ids are not known."""
    unwritten: str = ""
    """Why the log does not have it."""
    logged: bool = False

    @property
    def label(self) -> str:
        return f"#{self.number}" + (f".{self.part}" if self.part else "")

    @property
    def tokens(self) -> int:
        """Prompt tokens, as the server counts them; -1: not known."""
        return self.reported if self.reported >= 0 else len(self.row.prompt) or -1


@dataclass(frozen=True, slots=True)
class Differs:
    """A prompt differs from that of request `number` from token `token` on.

    `after`: tokens after it that both prompts have. `edits`: where and how the texts differ; empty if
    the requests are the same there, and the server renders them differently.
    """

    number: int
    token: int
    after: int
    edits: tuple[Edit, ...] = ()
    alike: bool = True
    """Whether both are requests of one session."""


class Judging:
    def __init__(self, settings: Settings, say: Callable[[str], None]) -> None:
        self._server = Server(settings.base, settings.headers, settings.insecure)
        self._routed = settings.routed
        """A router may answer by any of its servers: it is asked nothing."""
        self._named = Named(() if settings.routed else settings.events)
        self.joining = Joining(say)
        self._tried_at: float | None = None
        """When the server was last asked for its events."""
        self._asked_at = 0.0
        self._begun_at = time.time()
        self._scrape = self._looked()
        self.requests = self._judge()
        self._places = count()
        self._groups = Groups()
        self._recent = Latest[int, Request](MOST_REMEMBERED)
        """Requests whose text later ones are compared with, by their place."""
        self._newest = Latest[str, int](MOST_REMEMBERED)
        """The place of each session's newest request."""
        self._begin()

    def _looked(self) -> Scrape | None:
        if self._routed:
            return None
        try:
            return self._server.scrape()
        except KvtuneError:
            return None

    def _judge(self) -> Requests:
        """Return the judge of a server that has computed nothing, or of one of whose prompts some are not known."""
        scrape = self._scrape
        size = scrape.block_size if scrape is not None else None
        queries = scrape.get("prefix_cache_queries") if scrape is not None else None
        self._queries, self._scraped_at = queries or 0.0, time.time()
        fresh = scrape is not None and (queries == 0 or (scrape.started or 0.0) > self._begun_at)
        return Requests(Cache(complete=False), size or USUAL_BLOCK, whole=fresh)

    def _begin(self) -> None:
        """Read the server's events, if it publishes any; ask it again after a while if it does not."""
        now, tried_at = time.monotonic(), self._tried_at
        if self._routed or self.joining.on or (tried_at is not None and now < tried_at + AGAIN_S):
            return
        if tried_at is not None:
            self.requests.join_anew()
        self._tried_at = now
        self.joining.listen(self._server, self._named)

    def opened(self, request: Request) -> None:
        if self._scrape is None and self.requests.idle and (scrape := self._looked()) is not None:
            self.joining.close()
            self._scrape, self._tried_at = scrape, None
            self.requests = self._judge()
        request.group = _limited(request, lambda: self._groups.of(request), f"#{request.number}")
        if self.requests.earlier.tokens + len(request.row.prompt) > MOST_TOKENS:
            self._forget(whole=False)
        self._begin()
        if (request.row.t0 or 0.0) < self._scraped_at and self._queries > 0:
            # Requests are relayed before the server is asked: it has computed nothing else if its count is theirs.
            self._queries -= len(request.row.prompt)
            self.requests.earlier.whole |= self._queries == 0
        request.lost_before = self.joining.lost if self.joining.heard else None
        request.place = next(self._places)
        self.requests.open(request.place, request.row)
        request.before = self._newest.get(request.group, -1)
        self._recent[request.place], self._newest[request.group] = request, request.place

    def _differs(self, request: Request, divergence: Divergence | None) -> Differs | None:
        """Compare with the request before it in its session, else with the earlier prompt that has most of its text."""
        before = self._recent.get(request.before)
        if before is not None and (named := tuple(edits(before.body, request.body))):
            place = agreeing(packed(before.row.prompt), packed(request.row.prompt))
            beside = self.requests.earlier.beside(request.place, before.place, request.row.salt)
            return Differs(before.number, place, beside.after if beside is not None else 0, named)
        like = self._recent.get(divergence.like) if divergence is not None else None
        if divergence is None or like is None:
            return None
        alike, named = like.group == request.group, tuple(edits(like.body, request.body))
        if not alike and _another(named, like, request):
            named = ()
        if not named and alike:
            # What the server drops is in no body: tokens that only the earlier prompt has.
            gone, come = (some.stop - some.start for some in divergence.gap)
            named = stripped(like.body) if come < MERGED < gone else ()
        return Differs(like.number, divergence.at, divergence.after, named, alike)

    def begun(self, request: Request) -> None:
        """Its first token is out."""
        self.requests.first(request.place)

    def ended(self, request: Request) -> None:
        """Its answer has ended. What events say of it may still come before `closed`."""
        lacks = 0 <= request.row.hit < self.requests.seen(request.place)
        if lacks and self._restarted(request.row.t1 or 0.0):
            self._forget()
        self.requests.ended(request.place, request.row)

    def closed(self, request: Request) -> None:
        if (hit := request.row.hit) >= 0:
            request.tally, request.by = Tally(max(request.tokens, hit), hit), "usage"
        joined = request.lost_before is not None and request.lost_before == self.joining.lost
        answered = self.requests.close(request.place, by_events=joined)
        if answered is not None:
            request.differs = _limited(request, lambda: self._differs(request, answered.differs), None)
            request.tally = answered.tally
            request.by = request.by or ("events" if answered.tally is not None else "")

    def dropped(self, requests: Iterable[Request], *, computed: bool) -> None:
        """These have no answer; their prompts may have been `computed`, or a part of them."""
        for request in requests:
            self.requests.drop(request.place, computed=computed)

    def missed(self) -> None:
        """A prompt was computed that is not known here."""
        self.requests.earlier.whole = False

    def forget(self, number: int) -> None:
        """Forget the text of a request."""
        for place in [place for place, request in self._recent.items() if request.number == number]:
            del self._recent[place]
        self._groups.forget(number)

    @property
    def late_s(self) -> float:
        """Seconds after an answer's end until what the events say of it is complete."""
        return LATE_S if self.joining.on else 0.0

    def take(self) -> list[Received]:
        """Return the events that have come. Messages of requests sent before now must be taken before `add`."""
        return self.joining.take()

    def add(self, batches: Sequence[Received]) -> None:
        self.joining.add(batches, self.requests)

    def _restarted(self, now: float) -> bool:
        """Whether the server has been restarted since it was last asked."""
        if now - self._asked_at < ASK_S:
            return False
        self._asked_at = now
        before, after = self._scrape, self._looked()
        self._scrape = after or before
        return before is not None and after is not None and begun_anew(before, after)

    def _forget(self, *, whole: bool = True) -> None:
        """Begin with no earlier prompt: the server was restarted, or (not `whole`) there were too many."""
        self.requests.anew(whole=whole)
        self._recent.clear()
        self._newest.clear()

    def close(self) -> None:
        self.joining.close()
        self._server.close()


class Groups:
    """Finds sessions: a request goes on with that of an earlier one whose messages it begins with.

    Else with one of the client's newest sessions, if it has at least half of that one's messages, one of them changed;
    or if it is that one's compaction. System texts may change in a session, to another version of them.
    """

    def __init__(self) -> None:
        self._known = Latest[bytes, str](2 * MOST_SESSIONS)
        """The session of each beginning that a request had as a whole."""
        self._newest = Latest[str, tuple[Request, frozenset[bytes]]](MOST_REMEMBERED)
        """Each session's newest request and its messages."""
        self._numbers = count(1)

    def of(self, request: Request) -> str:
        messages = _messages(request)
        chain = list(accumulate(messages, lambda before, message: _hashed(before + message)))
        system = _system(request)
        group = self._grown(chain, system) or self._changed(request, frozenset(messages))
        group = group or f"s{next(self._numbers)}"
        for name in (chain[-1], _under(chain[-1], system)) if chain else ():
            self._known[name] = group
        self._newest[group] = request, frozenset(messages)
        return group

    def forget(self, number: int) -> None:
        for name in [name for name, (request, _) in self._newest.items() if request.number == number]:
            del self._newest[name]

    def _grown(self, chain: Sequence[bytes], system: str) -> str:
        """Return the session whose messages begin these, of the same system text or of another version of it."""
        for name in reversed(chain):
            if own := self._known.get(_under(name, system)):
                return own
        for length in range(len(chain), 0, -1):
            if (group := self._known.get(chain[length - 1])) is None:
                continue
            newest = self._newest.get(group)
            if length >= FEWEST or newest is None or _akin(_system(newest[0]), system):
                return group
        return ""

    def _changed(self, request: Request, messages: frozenset[bytes]) -> str:
        newest = reversed(self._newest.items())
        near = ((name, row) for name, row in newest if _client(row[0]) == _client(request))
        for name, (before, had) in islice(near, MOST_NEAR):
            if len(had) < FEWEST:
                continue
            changed = 2 * len(had & messages) >= len(had)
            if changed or any(edit.kind == "compaction" for edit in edits(before.body, request.body)):
                return name
        return ""


def _limited(request: Request, work: Callable[[], Result], otherwise: Result) -> Result:
    """Do work for a request that changes nothing until its end, and says so if it takes too long."""
    try:
        with cpu_limit(REQUEST_S):
            return work()
    except TooLongError as error:
        request.trouble = str(error)
        return otherwise


def _client(request: Request) -> tuple[str, str, str]:
    return request.row.kind, request.api, request.row.salt


def _another(named: Sequence[Edit], like: Request, request: Request) -> bool:
    """Whether most edits are of no kind, and many, and the system texts are no versions of one: another application.

    What its prompt has instead is no change of it.
    """
    untold = sum(edit.kind in UNTOLD for edit in named)
    return untold > max(MOST_PIECES, len(named) // 2) and not _akin(_system(like), _system(request))


def _akin(old: str, new: str) -> bool:
    """Whether two system texts are versions of one: most of their words come one after another alike."""
    rows = old.split(), new.split()
    was, now = (Counter(zip(row, row[1:], row[2:], strict=False)) for row in rows)
    return old == new or 2 * (was & now).total() > AKIN * (was.total() + now.total())


def _turns(request: Request) -> list[Any]:
    messages = request.body.get("messages", request.body.get("input"))
    return messages if isinstance(messages, list) else [messages] * (messages is not None)


def _is_system(message: object) -> bool:
    return isinstance(message, dict) and message.get("role") in ("system", "developer")


def _system(request: Request) -> str:
    """Return the beginning of what the system says in a request, values aside."""
    texts = [request.body.get("system"), request.body.get("instructions")]
    texts += [message.get("content") for message in _turns(request) if _is_system(message)]
    words = (text if isinstance(text, str) else json.dumps(_unmarked(text)) for text in texts if text)
    return masked(" ".join(words)[:JUDGED])


def _under(name: bytes, system: str) -> bytes:
    return _hashed(name + system.encode(errors="replace"))


def _messages(request: Request) -> list[bytes]:
    """Return a hash of each of the request's messages but the system's; of the prompt, if it has no messages."""
    whose = " ".join(_client(request))
    if not (turns := _turns(request)):
        return [_hashed(whose.encode(errors="replace") + packed(request.row.prompt))]
    return [
        _hashed(f"{whose} {json.dumps(_unmarked(message), sort_keys=True)}".encode(errors="replace"))
        for message in turns
        if not _is_system(message)
    ]


def _hashed(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16).digest()


def _unmarked(value: object) -> object:
    """Return a message for comparison: marks that move from turn to turn, such as `cache_control`, left out."""
    if isinstance(value, dict):
        return {name: _unmarked(inner) for name, inner in value.items() if name != "cache_control"}
    if isinstance(value, list) and not {dict, list}.isdisjoint(map(type, value)):
        return [_unmarked(inner) for inner in value]
    return value
