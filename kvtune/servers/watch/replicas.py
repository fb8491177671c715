"""The funnel of a log that several servers served, request by request: exact where their events were all read. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence, Set

from kvtune.data.run.extras import SessionRegret
from kvtune.data.run.funnel import Funnel, Range
from kvtune.requests.log.logged import Logged
from kvtune.requests.log.token_ids import packed
from kvtune.servers.watch.requests import Answered

MOST_SESSIONS = 50
"""Sessions that are named: those that lost most."""


class OneCache:
    """An LRU cache of `capacity` blocks. It stores a prompt when it is sent, and its answer when it ends.

    Of a prompt's blocks the last one is evicted first, as vLLM frees them.
    """

    def __init__(self, capacity: int, size: int) -> None:
        self._capacity, self._size = capacity, size
        self._names: dict[tuple[int, bytes], int] = {}
        self._held: OrderedDict[int, None] = OrderedDict()

    def look_up(self, tokens: Sequence[int], salt: str) -> int:
        """Return the tokens that a prompt hits, and store its whole blocks."""
        names = self._blocks(tokens, salt)
        most = (len(tokens) - 1) // self._size
        hit = next(
            (n for n, name in enumerate(names[:most]) if name not in self._held), min(most, len(names))
        )
        self._use(names)
        return hit * self._size

    def end(self, tokens: Sequence[int], salt: str) -> None:
        self._use(self._blocks(tokens, salt))

    def _blocks(self, tokens: Sequence[int], salt: str) -> list[int]:
        text, step = packed(tokens), 4 * self._size
        name = self._names.setdefault((0, salt.encode()), len(self._names) + 1)
        names = []
        for start in range(0, len(text) - step + 1, step):
            name = self._names.setdefault((name, text[start : start + step]), len(self._names) + 1)
            names.append(name)
        return names

    def _use(self, names: Sequence[int]) -> None:
        for name in reversed(names):
            self._held[name] = None
            self._held.move_to_end(name)
        while len(self._held) > self._capacity:
            self._held.popitem(last=False)


def one_cache(rows: Iterable[Logged], capacity: int, size: int) -> int:
    """Return the tokens that a log's requests hit in one cache. An answer without ids takes no room."""
    moments = [(time_s or 0.0, n, row) for row in rows for n, time_s in enumerate((row.t1, row.t0))]
    cache, hits = OneCache(capacity, size), 0
    for _, sent, row in sorted(moments, key=lambda moment: moment[:2]):
        if sent:
            hits += cache.look_up(row.prompt, row.salt)
        else:
            cache.end([*row.prompt, *row.answer[:-1]], row.salt)
    return hits


def funnel_of(
    answered: Sequence[Answered], blocks: int, size: int, *, whole: bool, remembered: bool = True
) -> Funnel:
    """Return the funnel of the requests whose hits are known.

    `blocks`: of all pools, which vLLM can use; 0: one cache is not told. `size`: of a block. `whole`: every event of
    every server was read. `remembered`: no block was forgotten.
    """
    judged = [answer for answer in answered if answer.tally is not None]
    asked = sum(answer.tally.query_tokens for answer in judged if answer.tally is not None)
    held, kept = sum(answer.held for answer in judged), sum(answer.kept for answer in judged)
    together = one_cache((answer.asked for answer in judged), blocks, size) if blocks and size else None
    return Funnel(
        prompt_tokens=asked,
        as_routed=sum(answer.tally.hit_tokens for answer in judged if answer.tally is not None),
        best_replica=Range(held, held if whole else asked),
        one_cache=None if together is None else Range(together, together),
        everything=Range(kept, kept if whole and remembered else asked),
    )


def regrets(answered: Iterable[Answered]) -> list[SessionRegret]:
    """Return the sessions whose requests another server had more of, those that lost most first."""
    rows: dict[str, list[Answered]] = {}
    for answer in answered:
        if answer.tally is not None and (name := answer.asked.session or answer.asked.kind):
            rows.setdefault(name, []).append(answer)
    sessions = [
        SessionRegret(
            sum(len(answer.asked.prompt) for answer in own),
            sum(answer.tally.hit_tokens for answer in own if answer.tally is not None),
            session=name,
            requests=len(own),
            replicas=len({answer.asked.replica for answer in own}),
            best_tokens=sum(answer.held for answer in own),
        )
        for name, own in rows.items()
    ]
    sessions.sort(key=lambda row: row.best_tokens - row.hit_tokens, reverse=True)
    return [row for row in sessions[:MOST_SESSIONS] if row.best_tokens > row.hit_tokens]


def assigned(rows: Iterable[Logged], sessions: Sequence[Set[str]], names: Sequence[Set[str]]) -> list[int]:
    """Return which server served each request of a log; -1: it is not known.

    By the log's `replica`, one of the `names` of a server. Where the log has none, by the session id, if one server
    alone published that in its events (`sessions`).
    """
    places = []
    for row in rows:
        if row.replica:
            servers = [server for server, own in enumerate(names) if row.replica in own]
        else:
            servers = [server for server, own in enumerate(sessions) if row.session and row.session in own]
        places.append(servers[0] if len(servers) == 1 else -1)
    return places
