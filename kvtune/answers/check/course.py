"""Runs a check: asks for greedy answers with logprobs, cold and on each path, and what of each prompt hit."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import contains
from pathlib import Path
from random import Random, SystemRandom
from secrets import token_hex
from typing import Annotated, Any

from msgspec import Meta, Struct

from kvtune.answers.check import paths
from kvtune.answers.check.judge import AGAIN, Answer, distance, limit
from kvtune.base.bounded import decode_json_as
from kvtune.base.errors import KvtuneError, UsageError, reason
from kvtune.base.files import read_regular
from kvtune.servers.tap.answers import counts_of
from kvtune.servers.watch.client import StatusError
from kvtune.servers.watch.facts import Facts, ShapeAtHand
from kvtune.servers.watch.metrics import Between, served
from kvtune.servers.watch.server import Server

ANSWER_S, COUNTED_S = 600.0, 2.0
"""Most seconds of an answer, and until the counters have it."""
TURNED_OVER = 1.5
"""Pools of other tokens behind which nothing of a prompt is left."""
RANDOM_IDS = (10, 400)
"""Token ids of prompts where the server reads no text: every vocabulary has them."""
COUNTERS = ("prefix_cache_queries", "prefix_cache_hits", "external_prefix_cache_hits")
FIELDS = {"temperature": 0.0, "logprobs": 5, "ignore_eos": True, "return_tokens_as_token_ids": True}
_Prompt = Annotated[list[Annotated[int, Meta(ge=0, lt=1 << 31)]], Meta(min_length=2 * paths.ENDS)]


class _Choice(Struct):
    logprobs: Answer


class _Completion(Struct):
    choices: list[_Choice]
    usage: dict[str, Any] = {}


class Earlier(Struct):
    """What is read of anyone's `--json`: no address. `salts`: the last under which a prompt was primed as a whole."""

    prompts: Annotated[list[_Prompt], Meta(min_length=2)]
    salts: list[Annotated[str, Meta(max_length=100)]]


class Asked(Earlier, kw_only=True):
    """What a check asks and says again. `computed_tokens`: those of its `requests`' prompts that missed.

    `unsalted`: requests with a fresh cache_salt that hit all the same. `limit_nats`: beyond it an answer is wrong.
    """

    model: str
    layout: paths.Layout
    requests: int = 0
    computed_tokens: int = 0
    unsalted: int = 0
    limit_nats: float = 0.0


def layout_of(server: Server, shape_at_hand: ShapeAtHand) -> paths.Layout:
    """Return what the server says of its cache. `shape_at_hand`: knows a model's window."""
    scrape, facts = server.scrape(), Facts(server, shape_at_hand)
    facts.ask()
    block, longest, shape = scrape.block_size, facts.limits.longest, facts.shape
    if scrape.cache.get("enable_prefix_caching") == "False" or not block:
        raise KvtuneError(f"prefix caching is off at {server.base}: nothing hits", "--enable-prefix-caching")
    if longest and longest < 6 * paths.ENDS:
        raise KvtuneError(f"{server.base} takes {longest} tokens: too few", "check another")
    offloads = scrape.cache.get("kv_offloading_size", "None") != "None"
    return paths.Layout(
        blocks=sorted({block, scrape.match_unit or block}),
        window=shape.window if shape and shape.window_layers else 0,
        pool=scrape.number("kv_cache_size_tokens") or 0,
        longest=longest,
        tier=offloads or bool(scrape.get("external_prefix_cache_queries")),
    )


def earlier(path: Path) -> Earlier:
    """Read the prompts of an earlier check. UsageError if the file has none."""
    try:
        file = decode_json_as(read_regular(path, 64 << 20), Earlier)
        if len(file.salts) != len(file.prompts):
            raise ValueError("not a salt for each prompt")
        return file
    except (OSError, ValueError) as error:
        what = f"{path} has no prompts of a check: {reason(error)}"
        raise UsageError(what, "give what `kvtune check --json` printed") from None


def prompts(server: Server, layout: paths.Layout, count: int, seed: int) -> Iterator[list[int]]:
    """Yield prompts: a register, then its first or last line again without the number, on which the answer hangs.

    Random ids if the server reads no text.
    """
    draw = Random(seed)
    for number in range(count):
        tokens = paths.length(layout, number)
        lines = [f"The code of {draw.getrandbits(32):08x} is" for _ in range(tokens // 6)]
        text = [f"{line} {draw.randrange(10_000, 99_999)}." for line in lines]
        try:
            last = server.tokenized({"prompt": f"\n{text[-1]}\n{lines[-(number % 2)]}"})
            yield [*server.tokenized({"prompt": "\n".join(text[:-1])})[: tokens - len(last)], *last]
        except KvtuneError:
            yield [draw.randrange(*RANDOM_IDS) for _ in range(tokens)]


class Compared(Struct, frozen=True):
    """A request's answer beside the cold one. `taken`: it is proved to be a hit of its path. `age`: requests since.

    `number`: of its prompt. `repeats`: whether the hit was wrong as often as it was asked for again.
    """

    path: str
    number: int
    ids: Sequence[int]
    cold: Answer
    answer: Answer
    nats: float
    taken: bool
    cached: int = 0
    age: int = 0
    repeats: bool = False


class Course(Asked, dict=True):
    """One check. `counts`: counters tell what hits. `colds`: each prompt's number, tokens and cold answer."""

    server: Server
    tokens: int
    fill: bool

    def run(self, say: Callable[[str], None] | None = None) -> Course:
        """Ask for the cold answers, alone and in batches, which compute them in other parts, and for each path's.

        `say` is told what begins. Without it nothing is sent: what a check would send at most is counted.
        """
        self.say, self.compared, self.counts = say, list[Compared](), self.layout.tier or any(self.salts)
        self.fitting = self.layout.pool // (2 * max(map(len, self.prompts)))
        self.why_not = {name: paths.why_not(name, self.layout, self.salts, self.fill) for name in paths.PATHS}
        self.colds = [(number, ids, self.ask(ids)[0][0]) for number, ids in enumerate(self.prompts)]
        for size in (1, 2, max(2, self.fitting)):
            for start in range(0, len(self.colds), size):
                self._again(*self.colds[start : start + size])
        for name in [*paths.PATHS][1:]:
            self.unsalted = sum(row.path in paths.COLD and not row.taken for row in self.compared)
            if not (self.unsalted or self.why_not[name]):
                self._take(name)
        return self

    def seconds(self) -> float:
        """Return how long the server would take at its pace until now; 0 if it has answered nobody."""
        scrape = self.server.scrape()
        spent, made = served(scrape), scrape.get("generation_tokens")
        queries, hits, _ = (scrape.get(name) or 0.0 for name in COUNTERS)
        if not made or queries <= hits:
            return 0.0
        prefill_s, decode_s = spent["prefill_s"] / (queries - hits), spent["decode_s"] / made
        return self.computed_tokens * prefill_s + self.requests * self.tokens * decode_s

    def _again(self, *asked: tuple[int, Sequence[int], Answer]) -> None:
        """Ask for cold answers again, in one batch. Only those that are alone have a salt of their own."""
        answers, cached, _ = self.ask(*(ids for _, ids, _ in asked))
        for (number, ids, cold), answer in zip(asked, answers, strict=True):
            taken = len(asked) > 1 or not cached
            self.compared.append(Compared("null", number, ids, cold, answer, distance(cold, answer), taken))
        self.limit_nats = limit(row.nats for row in self.compared if row.path == "null")

    def _take(self, name: str) -> None:
        """Ask for one path's answers, as many prompts at a time as fit if the cache is cleared for it."""
        if self.say:
            self.say(paths.PATHS[name])
        beyond, size = self.limit_nats, max(1, self.fitting) if name in paths.FILLED else 1
        salts = self.salts if name == "kept" else [token_hex(16) for _ in self.prompts]
        for first in range(0, len(self.prompts), size):
            since, primed = self.requests, []
            for number in range(len(self.prompts))[first : first + size]:
                plan = paths.way(name, self.layout, self.prompts, number, self.tokens)
                for ids in plan.primers:
                    (answer,), *_ = self.ask(ids, salt=salts[number], tokens=0 if name == "turn" else 1)
                if name == "turn":
                    turn = [*plan.primers[0], *(int(token[9:]) for token in answer.tokens)]
                    plan = plan._replace(ids=[*turn, *plan.ids[len(turn) :]])
                primed.append((number, plan))
            if name == "full":  # an eighth of what was primed goes
                self._evict(self.layout.pool - sum(len(plan.ids) for _, plan in primed) * 7 // 8)
            elif name in paths.FILLED:
                self._evict(int(TURNED_OVER * self.layout.pool), reset=True)
            for number, plan in reversed(primed):
                for ids in plan.later:
                    self.ask(ids, salt=salts[number], tokens=1)
                cold = self.ask(plan.ids)[0][0] if name in ("turn", "long") else self.colds[number][2]
                hit, age = partial(self.ask, plan.ids, salt=salts[number]), self.requests - since
                (answer,), cached, loaded = hit()
                taken = cached in plan.hits and (cached > loaded if loaded else None) == paths.TIER.get(name)
                nats = distance(cold, answer)
                repeats = taken and name not in paths.COLD and nats > beyond
                if repeats:  # a rare noise, or a fault?
                    repeats = all(distance(cold, hit()[0][0]) > beyond for _ in range(AGAIN))
                    self._again((number, plan.ids, cold), self.colds[number - 1])
                row = Compared(name, number, plan.ids, cold, answer, nats, taken, cached, age, repeats)
                self.compared.append(row)
        if name in ("whole", *paths.FILLED):
            self.salts = salts

    def _evict(self, wanted: int, reset: bool = False) -> None:
        """Fill the pool with tokens of other prompts, or `reset` it: servers do so only with VLLM_SERVER_DEV_MODE=1."""
        with contextlib.suppress(KvtuneError):
            if reset and self.say and self.server.client.ask("/reset_prefix_cache", {}) is not None:
                return
        for _ in range(wanted // len(self.prompts[0]) + 1):
            self.ask(SystemRandom().sample(self.prompts[0], len(self.prompts[0])), tokens=1)

    def ask(self, *asked: Sequence[int], salt: str = "", tokens: int = 0) -> tuple[list[Answer], int, int]:
        """Send prompts, computed together. Without `salt` nobody has used theirs. `tokens`: 0 for `self.tokens`.

        Return their answers, the tokens that were cached, and of them those that a connector loaded. They are 0 if the
        server does not say it, or answered others meanwhile.
        """
        size, salt, tokens = sum(map(len, asked)), salt or token_hex(16), tokens or self.tokens
        self.requests, self.computed_tokens = self.requests + 1, self.computed_tokens + size
        if not self.say:
            return [Answer([], []) for _ in asked], 0, 0
        before = self.server.scrape() if self.counts else None
        body = FIELDS | {"model": self.model, "prompt": asked, "max_tokens": tokens, "cache_salt": salt}
        try:
            read = self.server.client.json("/v1/completions", _Completion, body, seconds=ANSWER_S)
        except StatusError as error:
            why = "it refuses token ids, prompts as long as these, or cache_salt"
            raise KvtuneError(error.message, why if error.status == 400 else error.hint) from None
        made = [each.logprobs for each in read.choices]
        if [sum(map(contains, each.tops, each.tokens)) for each in made] != [tokens] * len(asked):
            what = f"{self.server.base} does not answer with the ids and logprobs of tokens"
            raise KvtuneError(what, "ask vLLM itself: a gateway may change answers")
        (*_, hits), loaded, end = counts_of(read.usage), 0, time.monotonic() + COUNTED_S
        self.counts, cached = self.counts or hits < 0, max(0, hits)
        while before is not None:
            between = Between(before, self.server.scrape())
            queries, local, loaded = (int(between.counted(name) or 0) for name in COUNTERS)
            if queries or time.monotonic() > end:
                cached, loaded = (local + loaded, loaded) if queries == size else (0, 0)
                break
        self.computed_tokens -= cached
        return made, cached, loaded
