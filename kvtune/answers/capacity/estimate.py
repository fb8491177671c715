"""How much of N sessions' prompts a pool would hit, in milliseconds: an LRU cache over whole conversations. Pure.

There are no blocks and no steps: prompts are computed one after another on one device and hold up the decodes, running
requests hold their tokens, and of what is left the conversation that was used longest ago loses its end first. That is
vLLM's order for one group of full attention. It finds the N worth replaying; the replays decide.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from kvtune.lab.device.cost import NOMINAL, StepCost
from kvtune.requests.loads.sessions import Load, Node, Play, Slots

Key = tuple[int, int, int]
"""A request: slot, the number of the session that it plays, node."""


@dataclass(frozen=True, slots=True)
class Engine:
    """What the estimate knows of an engine.

    `pool`: tokens of whole prompts that its KV cache holds. `cache`: tokens that can be hit, if a tier of host memory
    has more; 0: the pool's. `unit`: hits end at multiples of this. `max_num_seqs`: most requests that run at once;
    `chunk`: most tokens of a step.
    """

    pool: int
    unit: int = 16
    chunk: int = 8192
    max_num_seqs: int = 1024
    cost: StepCost = NOMINAL
    cache: int = 0


@dataclass(frozen=True, slots=True)
class Window:
    """Requests sent from `warm_s` until `end_s` are measured."""

    warm_s: float
    end_s: float


@dataclass(slots=True)
class Estimate:
    """Figures of the measured requests. `possible`: tokens that a cache hits which forgets nothing.

    Shares of the time: `prefilling`: a prompt is computed; `blocked`: one waits for a seat or for room in the pool;
    `waiting`: one waits for that, or for others that are computed before it.
    """

    requests: int = 0
    hits: int = 0
    possible: int = 0
    prompt: int = 0
    computed: int = 0
    output: int = 0
    prefilling: float = 0.0
    blocked: float = 0.0
    waiting: float = 0.0
    first_s: list[float] = field(default_factory=list)
    times_ms: list[dict[str, float]] = field(default_factory=list)
    """Of each request that ended: by the names of limits (`kvtune/data/run/slo.py`)."""
    stuck: int = 0
    """Requests that wait at the end for their prompt's computation."""

    def met(self, limits: Mapping[str, float]) -> float:
        """Return the share of the requests within all limits, of those that ended or wait."""
        within = sum(all(times[name] <= most for name, most in limits.items()) for times in self.times_ms)
        return within / max(1, len(self.times_ms) + self.stuck)

    @property
    def kept(self) -> float:
        return self.hits / self.possible if self.possible else 1.0

    @property
    def hit_rate(self) -> float:
        return self.hits / self.prompt if self.prompt else 0.0


@dataclass(slots=True)
class _Slot:
    number: int
    plays: Iterator[Play]
    play: Play
    session: int = -1
    missing: dict[int, int] = field(default_factory=dict)
    followers: dict[int, list[int]] = field(default_factory=dict)
    left: int = 0
    begun: dict[int, int] = field(default_factory=dict)
    """Earlier requests that the slot did not send -> the tokens that its first request has in common with them."""
    shared: list[int] = field(default_factory=list)
    """For each request, the first tokens that all sessions share."""


@dataclass(slots=True)
class _Running:
    slot: _Slot
    node: Node
    key: Key
    sent_s: float
    held: int
    first_s: float
    measured: bool


SEND, NEXT = 0, 1


def estimate(slots: Slots, count: int, engine: Engine, window: Window) -> Estimate:
    """Return what `count` slots would hit."""
    return _Replay(slots, count, engine, window).run()


class _Replay:
    def __init__(self, slots: Slots, count: int, engine: Engine, window: Window) -> None:
        self._load: Load = slots.load
        self._engine, self._window = engine, window
        self._most = max(engine.pool, engine.cache)
        self._events: list[tuple[float, int, int, _Slot, int, int]] = []
        self._ends: list[tuple[float, int, Key]] = []
        """When answers end, by a clock that stands while a prompt is computed: that holds up all of them."""
        self._ticks = 0
        self._waiting: deque[tuple[_Slot, int, int, float]] = deque()
        self._lru: OrderedDict[Key, int] = OrderedDict()  # what ended requests left, the oldest first
        self._taken: dict[
            Key, tuple[Key, int]
        ] = {}  # request -> the one whose prompt now has its first tokens
        self._running: dict[Key, _Running] = {}
        self._started: set[Key] = set()
        self._heads: set[int] = set()
        self._cached = self._held = self._fixed = 0
        self._free_s = self._work_s = self._looked_s = 0.0
        self._out = Estimate()
        for number in range(count):
            plays = slots.plays(number)
            slot = _Slot(number, plays, next(plays))
            self._begin(slot, 0.0)

    def run(self) -> Estimate:
        events, ends, waiting, end_s = self._events, self._ends, self._waiting, self._window.end_s
        while events or ends:
            answered = bool(ends) and (not events or ends[0][0] + self._work_s <= events[0][0])
            at_s = ends[0][0] + self._work_s if answered else events[0][0]
            if waiting:
                self._out.waiting += self._within(self._looked_s, at_s)
                self._out.blocked += self._within(max(self._looked_s, self._free_s), at_s)
            self._looked_s = at_s
            if at_s > end_s:
                break
            if answered:
                self._ended(at_s, self._running.pop(heapq.heappop(ends)[2]))
            else:
                _, _, kind, slot, number, session = heapq.heappop(events)
                if kind == SEND:
                    waiting.append((slot, number, session, at_s))
            while waiting and self._free_s <= at_s:
                if len(self._running) >= self._engine.max_num_seqs or not self._start(at_s, *waiting[0]):
                    break
                waiting.popleft()
                if waiting:
                    self._at(self._free_s, NEXT, *waiting[0][:3])
        length_s = end_s - self._window.warm_s
        self._out.stuck = sum(sent_s >= self._window.warm_s for *_, sent_s in waiting)
        self._out.prefilling /= length_s
        self._out.blocked /= length_s
        self._out.waiting /= length_s
        return self._out

    def _within(self, since_s: float, until_s: float) -> float:
        return max(0.0, min(until_s, self._window.end_s) - max(since_s, self._window.warm_s))

    def _at(self, at_s: float, kind: int, slot: _Slot, number: int, session: int) -> None:
        self._ticks += 1
        heapq.heappush(self._events, (at_s, self._ticks, kind, slot, number, session))

    def _begin(self, slot: _Slot, at_s: float) -> None:
        """Let the slot play its session: what waits for nothing is sent after its pause."""
        slot.session += 1
        slot.missing.clear()
        slot.followers.clear()
        slot.left = 0
        play = slot.play
        nodes, begin = play.session.nodes, play.begin
        slot.begun = _common_with_unsent(nodes, begin)
        slot.shared = _shared(nodes) if self._load.rules.share else []
        for number in range(begin, len(nodes)):
            after = [node for node in nodes[number].after if node >= begin]
            slot.left += 1
            for node in after:
                slot.followers.setdefault(node, []).append(number)
            if after:
                slot.missing[number] = len(after)
            else:
                pause_s = play.delay_s if number == begin else self._load.pause(nodes[number])
                self._at(at_s + pause_s, SEND, slot, number, slot.session)

    def _start(self, now_s: float, slot: _Slot, number: int, session: int, sent_s: float) -> bool:
        """Compute a request's prompt, as the device is free. False: the pool has no room for it yet."""
        node = slot.play.session.nodes[number]
        key = (slot.number, session, number)
        total = node.tokens + node.output
        shared = slot.shared[number] if slot.shared else 0
        own = total - shared
        if self._held + self._fixed + own > self._engine.pool and self._running:
            return False
        unit, last = self._engine.unit, node.tokens - 1
        parent, common = node.parent, node.common
        if 0 <= parent < slot.play.begin:
            common = min(common, slot.begun.get(parent, 0))
            parent = slot.play.begin if common else -1
        possible = min(max(common, shared if shared in self._heads else 0), last) // unit * unit
        hit = 0
        if shared:
            if shared in self._heads:
                hit = shared
            else:
                self._heads.add(shared)
                self._fixed += shared
        before = slot.number, session, parent
        if before in self._started and common > shared:
            hit = max(hit, shared + self._take(before, key, common - shared))
        self._started.add(key)
        hit = min(hit, last) // unit * unit
        self._evict(self._held + self._cached + self._fixed + own - self._most)
        self._held += own
        computed = node.tokens - hit
        duration_s = self._prefill_s(computed, hit)
        self._free_s = now_s + duration_s
        self._work_s += duration_s
        self._out.prefilling += self._within(now_s, self._free_s)
        measured = self._window.warm_s <= sent_s < self._window.end_s
        self._running[key] = _Running(slot, node, key, sent_s, own, self._free_s, measured)
        self._ticks += 1
        left_s = self._free_s + node.output * self._token_s() - self._work_s
        heapq.heappush(self._ends, (left_s, self._ticks, key))
        if measured:
            out = self._out
            out.requests += 1
            out.hits += hit
            out.possible += possible
            out.prompt += node.tokens
            out.computed += computed
            out.output += node.output
            out.first_s.append(self._free_s - sent_s)
        return True

    def _take(self, parent: Key, key: Key, common: int) -> int:
        """Return how many of the first `common` tokens of `parent` are cached, and let request `key` have them.

        A later request may have the first tokens of an earlier one; what that one has after them stays in its place.
        """
        path: list[tuple[Key, int]] = []
        holder, wanted = parent, common
        while (taken := self._taken.get(holder)) is not None:
            path.append((holder, wanted))
            holder, wanted = taken[0], min(wanted, taken[1])
        if holder in self._running:
            hit = wanted
        else:
            hit = self._moved(holder, wanted)
            self._taken[holder] = key, wanted  # what it had lost is computed again
        for above, most in reversed(path):
            until = self._taken[above][1]
            if most <= until:
                continue
            if hit >= until:
                hit += self._moved(above, most - until)
            elif above in self._lru:
                continue  # it has tokens after those that are missing
            self._taken[above] = key, most
        return hit

    def _moved(self, holder: Key, tokens: int) -> int:
        """Take up to `tokens` tokens from the beginning of what an ended request left; return how many it had."""
        left = self._lru.get(holder, 0)
        moved = min(left, tokens)
        if moved:
            self._cached -= moved
            if left > moved:
                self._lru[holder] = left - moved  # in its place: the rest was not used
            else:
                del self._lru[holder]
        return moved

    def _evict(self, tokens: int) -> None:
        lru = self._lru
        while tokens > 0 and lru:
            key = next(iter(lru))
            gone = min(lru[key], tokens)
            if gone == lru[key]:
                del lru[key]
            else:
                lru[key] -= gone
            self._cached -= gone
            tokens -= gone

    def _prefill_s(self, computed: int, hit: int) -> float:
        cost = self._engine.cost
        steps = -(-computed // self._engine.chunk)
        each_us = cost.step_us + cost.between_us + cost.prefill_step_us
        attended = computed * (hit + computed / 2)
        return 1e-6 * (steps * each_us + cost.prefill_token_us * computed + cost.prefill_kv_us * attended)

    def _token_s(self) -> float:
        cost = self._engine.cost
        running = len(self._running)
        return 1e-6 * (
            cost.step_us + cost.between_us + cost.decode_us * running + cost.kv_token_us * self._held
        )

    def _ended(self, at_s: float, running: _Running) -> None:
        """End a request; what waits for it is sent after its pause."""
        slot, (_, session, number) = running.slot, running.key
        self._held -= running.held
        self._lru[running.key] = running.held
        self._cached += running.held
        if running.measured:
            gaps = max(1, running.node.output - 1)
            times_s = {
                "ttft": running.first_s - running.sent_s,
                "tpot": (at_s - running.first_s) / gaps,
                "e2e": at_s - running.sent_s,
            }
            self._out.times_ms.append({name: 1e3 * took for name, took in times_s.items()})
        if session != slot.session:
            return
        slot.left -= 1
        for follower in slot.followers.get(number, ()):
            slot.missing[follower] -= 1
            if not slot.missing[follower]:
                pause_s = self._load.pause(slot.play.session.nodes[follower])
                self._at(at_s + pause_s, SEND, slot, follower, session)
        if not slot.left:
            slot.play = next(slot.plays)
            self._begin(slot, at_s)


def _common_with_unsent(nodes: tuple[Node, ...], begin: int) -> dict[int, int]:
    """Return what the first request of an entered session has in common with those before it."""
    common: dict[int, int] = {}
    node, tokens = nodes[begin], nodes[begin].common
    while node.parent >= 0:
        tokens = min(tokens, node.common)
        common[node.parent] = tokens
        node = nodes[node.parent]
    return common


def _shared(nodes: tuple[Node, ...]) -> list[int]:
    """Return how many first tokens of each request are those that all sessions share."""
    shared: list[int] = []
    for node in nodes:
        if node.parent >= 0:
            shared.append(min(shared[node.parent], node.common))
        else:
            shared.append(sum(span.length for span in node.head))
    return shared
