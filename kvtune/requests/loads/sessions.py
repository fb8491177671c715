"""Sessions: conversations as they were recorded, without tokens, and N slots that play them. Pure.

A session is a list of requests (`Node`), each with the requests that it waits for, the pause before it, and the earlier
request whose prompt it continues. A slot plays a session to its end and then draws the next one. What a slot draws
follows from the seed and the slot's number alone, so the load of N + 1 slots contains that of N.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from kvtune.base.errors import UsageError
from kvtune.requests.loads.draws import numbers
from kvtune.requests.types import STREAM_ANSWER, Draft, Request, Span

TURN_S = 5.0
"""About how long a turn takes besides its pause: where in a session a slot may begin, and the order of requests."""
LEAST_TOKEN_S = 0.001
"""No engine makes one request's tokens faster: how much a slot must hold to be busy to the end."""
MOST_REQUESTS = 1_000_000
_SLOT, _DRAW = 44, 24  # bits of a stream's number: slot, drawn session, node
_UNSENT = 1 << 22  # streams of answers of requests that are before a slot's beginning


@dataclass(frozen=True, slots=True)
class Node:
    """One request. It is sent `think_s` seconds after the last of the requests `after` has ended.

    Its first `common` tokens are those of request `parent` (-1: none), prompt and answer. `head`: tokens at its begin
    that other sessions have, too, as spans of streams that all sessions share; only where there is no parent.
    `sub`: of a sub-agent.
    """

    tokens: int
    output: int
    after: tuple[int, ...] = ()
    think_s: float = 0.0
    parent: int = -1
    common: int = 0
    sub: bool = False
    head: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True)
class Session:
    """A conversation: requests, each after those that it waits for. `start_s`: when it began, in its log's seconds."""

    name: str
    nodes: tuple[Node, ...]
    start_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Rules:
    """How sessions are played.

    `max_think`: longer pauses are cut to this. `longest`: a session ends before its first request of more tokens, with
    its answer; 0: no limit. `answers`: an answer is in the next prompt as the engine computed it; else as new text.
    `share`: sessions share what `Node.head` says. `subagents`: those that run beside a session are played, too.
    `speed`: pauses are divided by this.
    """

    max_think: float = 600.0
    longest: int = 0
    answers: bool = True
    share: bool = False
    subagents: bool = True
    speed: float = 1.0


@dataclass(frozen=True, slots=True)
class Load:
    """Sessions that are played by rules. `left_out`: requests, and sessions, that are too long."""

    sessions: tuple[Session, ...]
    rules: Rules
    left_out: tuple[int, int] = (0, 0)
    note: str = ""

    @property
    def requests(self) -> int:
        return sum(len(session.nodes) for session in self.sessions)

    def pause(self, node: Node) -> float:
        """Return the pause before a request as it is played."""
        return min(node.think_s, self.rules.max_think) / self.rules.speed

    @property
    def cut_share(self) -> float:
        """The share of turns whose pause is cut."""
        turns = [node for session in self.sessions for node in session.nodes if node.after]
        return sum(node.think_s > self.rules.max_think for node in turns) / max(1, len(turns))

    def turn_s(self, session: Session) -> list[float]:
        """Return about how long each turn of a session takes with its pause; 0 for those of sub-agents."""
        return [0.0 if node.sub else self.pause(node) + TURN_S for node in session.nodes]


def load(sessions: Sequence[Session], rules: Rules, source: str, note: str = "") -> Load:
    """Return sessions as they are played by `rules`. UsageError if no session is left. `source` is for that error."""
    kept, requests, whole = [], 0, 0
    for session in sessions:
        nodes = session.nodes if rules.subagents else _without_subagents(session.nodes)
        fits = nodes
        if rules.longest:
            long = (number for number, node in enumerate(nodes) if node.tokens + node.output > rules.longest)
            fits = nodes[: next(long, len(nodes))]
        requests += len(nodes) - len(fits)
        whole += not fits
        if not rules.answers:
            fits = tuple(
                replace(session, common=min(session.common, fits[session.parent].tokens))
                if session.parent >= 0
                else session
                for session in fits
            )
        if fits:
            kept.append(session if fits is session.nodes else replace(session, nodes=fits))
    if not kept:
        raise UsageError(
            f"{source}: no session's first request fits in {rules.longest:,} tokens",
            "allow longer ones: longest=, or the model's --max-model-len",
        )
    return Load(tuple(kept), rules, (requests, whole), note)


def _without_subagents(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """Leave out sub-agents: what waited for one then waits for what that one waited for."""
    place: dict[int, int] = {}
    for number, node in enumerate(nodes):
        if not node.sub:
            place[number] = len(place)
    waits: list[frozenset[int]] = []
    for number, node in enumerate(nodes):
        awaited: frozenset[int] = frozenset().union(*(waits[before] for before in node.after))
        waits.append(awaited if node.sub else frozenset((number,)))
    kept = []
    for node in nodes:
        if not node.sub:
            after = sorted({place[awaited_node] for before in node.after for awaited_node in waits[before]})
            parent = place.get(node.parent, -1)
            kept.append(
                replace(node, after=tuple(after), parent=parent, common=node.common if parent >= 0 else 0)
            )
    return tuple(kept)


@dataclass(frozen=True, slots=True)
class Play:
    """A session that a slot plays from its request `begin` on. `delay_s`: the pause before that request."""

    session: Session
    begin: int = 0
    delay_s: float = 0.0


class Slots:
    """What the slots of a load draw. A slot's first session is entered somewhere: one that takes long is drawn more
    often, and each moment of it is as likely. The load is then the same at its begin as later on.
    """

    def __init__(self, load: Load, seed: int) -> None:
        self.load, self._seed = load, seed
        self._turns = [load.turn_s(session) for session in load.sessions]
        self._weights = list(accumulate(sum(turns) for turns in self._turns))

    def plays(self, slot: int) -> Iterator[Play]:
        """Yield the sessions that a slot plays, without end."""
        sessions, drawn = self.load.sessions, numbers(self._seed, slot)
        picked = bisect_right(self._weights, next(drawn) * self._weights[-1])
        picked = min(picked, len(sessions) - 1)
        yield self._entered(picked, next(drawn))
        for number in drawn:
            picked = min(int(number * len(sessions)), len(sessions) - 1)
            session = sessions[picked]
            yield Play(session, 0, self.load.pause(session.nodes[0]))

    def _entered(self, picked: int, moment: float) -> Play:
        session, turns = self.load.sessions[picked], self._turns[picked]
        passed, at_s = 0.0, moment * sum(turns)
        begin = 0
        for number, turn_s in enumerate(turns):
            if turn_s:
                begin, passed = number, passed + turn_s
                if passed >= at_s:
                    break
        return Play(
            session, begin, min(max(passed - at_s, 0.0), self.load.rules.max_think / self.load.rules.speed)
        )


@dataclass(slots=True)
class _Sent:
    """A request of a slot. `about_s`: about when it is sent; only the order in the workload follows from that."""

    about_s: float
    play: _Played
    node: int
    after: tuple[int, ...]
    pause_s: float


@dataclass(slots=True)
class _Played:
    """A session as one slot plays it. `at`: the numbers of its requests, by node."""

    play: Play
    base: int
    number: int
    slot: int
    at: dict[int, int]


def closed_loops(load: Load, count: int, seconds: float, seed: int) -> Draft:
    """Return `count` slots that play sessions for `seconds`. Requests are about in the order in which they are sent."""
    slots = Slots(load, seed)
    sent: list[_Sent] = []
    played: list[_Played] = []
    for slot in range(count):
        filled, end_s = 0.0, 0.0
        last: tuple[int, ...] = ()
        for draw, play in enumerate(slots.plays(slot)):
            slot_play = _Played(play, (1 + slot << _SLOT) + (draw << _DRAW), len(played), slot, {})
            played.append(slot_play)
            first = len(sent)
            _play(load, slot_play, sent, last, end_s)
            if len(sent) > MOST_REQUESTS:
                raise UsageError(
                    f"{count:,} sessions at once are more than {MOST_REQUESTS:,} requests in {seconds:,.0f} s",
                    "lower sessions= or hours=",
                )
            awaited = {before for each in sent[first:] for before in each.after}
            last = tuple(number for number in range(first, len(sent)) if number not in awaited)
            end_s = max(each.about_s for each in sent[first:])
            filled += sum(
                each.pause_s + LEAST_TOKEN_S * play.session.nodes[each.node].output
                for each in sent[first:]
                if not play.session.nodes[each.node].sub
            )
            if filled >= seconds:
                break
    return Draft(_requests(load, sent, played), None, note=notes(load))


def as_recorded(load: Load, concurrency: int = 0) -> Draft:
    """Return each session once, begun when its log says, all at once if it does not say."""
    sent: list[_Sent] = []
    played = []
    for number, session in enumerate(load.sessions):
        session_play = _Played(Play(session), (1 + number) << _SLOT, number, number, {})
        played.append(session_play)
        _play(load, session_play, sent, (), session.start_s / load.rules.speed)
    return Draft(_requests(load, sent, played), concurrency or None, note=notes(load))


def _play(load: Load, play: _Played, sent: list[_Sent], last: tuple[int, ...], at_s: float) -> None:
    """Append a session's requests. Those that wait for none of the session wait for `last`, or for time `at_s`."""
    for number, node in enumerate(play.play.session.nodes):
        if number < play.play.begin:
            continue
        after = tuple(play.at[before] for before in node.after if before in play.at)
        pause_s = play.play.delay_s if number == play.play.begin else load.pause(node)
        begun_s = max((sent[before].about_s for before in after), default=at_s)
        if not after and not last:
            pause_s += at_s
            begun_s = 0.0
        play.at[number] = len(sent)
        sent.append(_Sent(begun_s + pause_s + TURN_S, play, number, after or last, pause_s))


def _requests(load: Load, sent: Sequence[_Sent], played: Sequence[_Played]) -> list[Request]:
    order = _ordered(sent)
    place = [0] * len(sent)
    for position, number in enumerate(order):
        place[number] = position
    prompts = {
        number: prompt for play in played for number, prompt in _prompts(load.rules, play, place).items()
    }
    requests = []
    for number in order:
        each = sent[number]
        session, node = each.play.play.session, each.play.play.session.nodes[each.node]
        requests.append(
            Request(
                f"{each.play.slot}.{session.name}.{each.node}",
                prompts[number],
                node.output,
                arrival_s=None if each.after else round(each.pause_s, 6),
                after=tuple(sorted(place[before] for before in each.after)),
                think_s=round(each.pause_s, 6) if each.after else 0.0,
                kind="agent" if node.sub else "turn",
                session=each.play.number,
            )
        )
    return requests


def _ordered(sent: Sequence[_Sent]) -> list[int]:
    """Return the requests' numbers by about when they are sent, each after those that it waits for or continues."""
    done = bytearray(len(sent))
    order: list[int] = []
    for number in sorted(range(len(sent)), key=lambda index: (sent[index].about_s, index)):
        stack = [number]
        while stack:
            top = stack[-1]
            if done[top]:
                stack.pop()
                continue
            each = sent[top]
            continued = each.play.at.get(each.play.play.session.nodes[each.node].parent, top)
            missing = [before for before in (*each.after, continued) if before != top and not done[before]]
            if missing:
                stack.extend(missing)
            else:
                done[top] = 1
                order.append(top)
                stack.pop()
    return order


def _prompts(rules: Rules, play: _Played, place: Sequence[int]) -> dict[int, tuple[Span, ...]]:
    """Return the prompts of a played session by request number."""
    nodes = play.play.session.nodes
    made: list[tuple[Span, ...]] = []
    for number, node in enumerate(nodes):
        if node.parent >= 0:
            before = nodes[node.parent]
            parent = made[node.parent]
            if node.common > before.tokens:
                sent = play.at.get(node.parent)
                stream = play.base + _UNSENT + node.parent if sent is None else STREAM_ANSWER + place[sent]
                parent = (*parent, Span(stream, 0, before.output))
            prompt = cut(parent, node.common)
        else:
            prompt = node.head if rules.share else ()
        have = sum(span.length for span in prompt)
        if have < node.tokens:
            prompt = (*prompt, Span(play.base + number, 0, node.tokens - have))
        made.append(prompt)
    return {number: made[node] for node, number in play.at.items()}


def cut(spans: Sequence[Span], tokens: int) -> tuple[Span, ...]:
    """Return the first `tokens` tokens."""
    kept = []
    for span in spans:
        if tokens <= 0:
            break
        kept.append(span if span.length <= tokens else span._replace(length=tokens))
        tokens -= span.length
    return tuple(kept)


def notes(load: Load) -> str:
    """Return, in words, what was left out or changed."""
    notes = [load.note] if load.note else []
    if share := load.cut_share:
        notes.append(f"{100 * share:.1f} % of the pauses are cut to {load.rules.max_think:g} s (max_think)")
    requests, sessions = load.left_out
    if requests:
        also = f", {sessions} of {sessions + len(load.sessions)} sessions whole" if sessions else ""
        notes.append(
            f"{requests:,} requests are left out: they or earlier ones are over {load.rules.longest:,} tokens{also}"
        )
    return "; ".join(notes)
