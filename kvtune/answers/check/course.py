"""Runs a check: asks for greedy answers with logprobs, cold and on each path, and what of each prompt hit."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import contains
from random import Random, SystemRandom
from secrets import token_hex
from typing import Annotated

import msgspec
from msgspec import Meta

from kvtune.answers.check import paths
from kvtune.answers.check.judge import Answer, distance
from kvtune.base.errors import KvtuneError
from kvtune.servers.watch.endpoints import host_of
from kvtune.servers.watch.facts import LOCAL, ShapeAtHand
from kvtune.servers.watch.metrics import Between
from kvtune.servers.watch.server import Server

Heard = tuple[list[Answer], int, int]
"""Answers, and the tokens of their prompts that were cached; of them, those that a connector loaded."""
ANSWER_S, COUNTED_S = 600.0, 2.0
"""Most seconds of an answer, and until the counters have it."""
LEAST = -100.0
"""Taken for lower logprobs: vLLM writes -9999 for minus infinity."""
RANDOM_IDS = (10, 400)
"""Token ids of prompts where the server reads no text: every vocabulary has them."""
TURNED_OVER, JUNK_TOKENS = 1.5, 1000
"""Pools of other tokens behind which nothing of a prompt is left; tokens of a request that fills them."""
COUNTERS = ("prefix_cache_queries", "prefix_cache_hits", "external_prefix_cache_hits")
FIELDS = {"temperature": 0.0, "logprobs": 5, "ignore_eos": True, "return_tokens_as_token_ids": True}


_Name = Annotated[str, Meta(pattern="^token_id:[0-9]{1,10}$")]


class _Usage(msgspec.Struct):
    prompt_tokens_details: dict[str, Annotated[int, Meta(ge=0)] | None] | None = None


class _Logprobs(msgspec.Struct):
    tokens: list[_Name]
    top_logprobs: list[dict[_Name, float]]


class _Choice(msgspec.Struct):
    logprobs: _Logprobs


class _Completion(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage = msgspec.field(default_factory=_Usage)


def layout_of(server: Server, shape_at_hand: ShapeAtHand) -> tuple[paths.Layout, str]:
    """Return what the server says of its cache, and its model's name. `shape_at_hand`: knows a model's window."""
    scrape, card = server.scrape(), server.card()
    block = scrape.block_size
    if scrape.cache.get("enable_prefix_caching") == "False" or not block:
        raise KvtuneError(f"prefix caching is off at {server.base}: nothing hits", "--enable-prefix-caching")
    if card.max_model_len and card.max_model_len < 6 * paths.ENDS:
        raise KvtuneError(f"{server.base} takes {card.max_model_len} tokens: too few", "check another")
    local = host_of(server.base) in LOCAL
    shapes = [shape_at_hand(name, local) for name in (card.root, card.id) if name]
    offloads = scrape.cache.get("kv_offloading_size", "None") != "None"
    layout = paths.Layout(
        blocks=sorted({block, scrape.match_unit or block}),
        window=max((shape.window for shape in shapes if shape and shape.window_layers), default=0),
        pool=scrape.number("kv_cache_size_tokens") or 0,
        longest=card.max_model_len or 0,
        tier=offloads or bool(scrape.get("external_prefix_cache_queries")),
    )
    return layout, card.id


def prompts(server: Server, layout: paths.Layout, count: int, seed: int) -> list[paths.Prompt]:
    """Make prompts: a register, then its first or last line again without the number, on which the answer hangs.

    Random ids if the server reads no text.
    """
    draw, made = Random(seed), []
    for number in range(count):
        tokens = paths.length(layout, number)
        lines = paths.records(draw, tokens // 6)
        text = [f"{start} {code}." for start, code in lines]
        try:
            last = server.tokenized({"prompt": f"\n{text[-1]}\n{lines[-(number % 2)][0]}"})
            ids = [*server.tokenized({"prompt": "\n".join(text[:-1])})[: tokens - len(last)], *last]
        except KvtuneError:
            ids = [draw.randrange(*RANDOM_IDS) for _ in range(tokens)]
        made.append(paths.Prompt(number, ids))
    return made


class Compared(msgspec.Struct, frozen=True):
    """A request's answer beside the cold one. `taken`: it is proved to be a hit of its path. `age`: requests since."""

    path: str
    ids: Sequence[int]
    cold: Answer
    answer: Answer
    taken: bool = True
    cached: int = 0
    age: int = 0

    @property
    def nats(self) -> float:
        return distance(self.cold, self.answer)


@dataclass
class Course:
    """One check. `counts`: counters tell what hits. `sent`: requests; `computed`: their prompt tokens that missed.

    `say` is told what begins. Without it nothing is sent: what a check would send at most is counted.
    """

    server: Server
    model: str
    layout: paths.Layout
    prompts: Sequence[paths.Prompt]
    tokens: int
    fill: bool
    say: Callable[[str], None] | None = None
    compared: list[Compared] = field(default_factory=list)
    sent: int = 0
    computed: int = 0
    counts: bool = False

    def run(self) -> Course:
        """Ask for the cold answers, alone and in another batch, and for those of each path."""
        self.cold = [self.ask(each.ids, tokens=self.tokens)[0][0] for each in self.prompts]
        for pair in zip(self.prompts[::2], self.prompts[1::2], strict=False):
            answers, *_ = self.ask(*(each.ids for each in pair), tokens=self.tokens)
            for each, answer in zip(pair, answers, strict=True):
                self.compared.append(Compared("null", each.ids, self.cold[each.number], answer))
        for name in (*paths.COLD, *paths.PATHS):
            if not paths.why_not(name, self.layout, self.fill) and (name in paths.COLD or not self.unsalted):
                self._take(name)
        return self

    @property
    def unsalted(self) -> int:
        """How many requests hit although nobody had used their cache_salt."""
        return sum(row.path in paths.COLD and not row.taken for row in self.compared)

    def _take(self, name: str) -> None:
        """Ask for one path's answers, all prompts at a time if the cache is cleared for it."""
        if self.say:
            self.say({**paths.COLD, **paths.PATHS}[name])
        pairs = zip(self.prompts, [*self.prompts[1:], *self.prompts[:1]], strict=True)
        rows = [(each, paths.way(name, self.layout, each, other, self.tokens)) for each, other in pairs]
        if name in paths.FILLED:  # what is primed must fit
            rows = rows[: max(1, self.layout.pool // (2 * max(len(each.ids) for each in self.prompts)))]
        for batch in [rows] if name in paths.FILLED else [[row] for row in rows]:
            since, primed = self.sent, []
            for prompt, plan in batch:
                salt, start = _salt(), []
                for ids in plan.primers:
                    (answer,), *_ = self.ask(ids, salt=salt, tokens=self.tokens if plan.turn else 1)
                    start = [*ids, *answer.tokens] if plan.turn else []
                primed.append((prompt, plan, salt, start))
            if name == "full":  # half of what was kept is left
                self._fill(self.layout.pool - sum(len(prompt.ids) for prompt, _ in batch) // 2)
            elif name in paths.TIER and not self._emptied():
                self._fill(int(TURNED_OVER * self.layout.pool))
            for prompt, plan, salt, start in reversed(primed):
                for primer in plan.later:
                    self.ask(primer, salt=salt)
                ids = [*start, *(plan.ids or prompt.ids)[len(start) :]]
                cold = self.ask(ids, tokens=self.tokens)[0][0] if start else self.cold[prompt.number]
                age = self.sent - since
                (answer,), cached, loaded = self.ask(ids, salt=salt, tokens=self.tokens)
                origin = (name not in (*paths.COLD, "tier"), name in paths.TIER)
                taken = plan.least <= cached <= plan.most and (cached > loaded, loaded > 0) == origin
                self.compared.append(Compared(name, ids, cold, answer, taken, cached, age))

    def _fill(self, wanted: int) -> None:
        """Fill the pool with tokens of other prompts."""
        words = [word for prompt in self.prompts for word in prompt.ids]
        size = min(JUNK_TOKENS, len(self.prompts[0].ids))
        for _ in range(wanted // size + 1):
            self.ask(SystemRandom().choices(words, k=size))

    def _emptied(self) -> bool:
        """Whether the server has emptied its cache: only with VLLM_SERVER_DEV_MODE=1."""
        with contextlib.suppress(KvtuneError):
            return self.say is not None and self.server.client.ask("/reset_prefix_cache", {}) is not None
        return False

    def ask(self, *asked: Sequence[int], salt: str = "", tokens: int = 1) -> Heard:
        """Send prompts that are computed together. Without `salt` nobody has used theirs.

        What is cached is 0 if the server does not say it, or answered others meanwhile.
        """
        size = sum(map(len, asked))
        self.sent, self.computed = self.sent + 1, self.computed + size
        if not self.say:
            return [Answer([], []) for _ in asked], 0, 0
        before = self.server.scrape() if self.counts else None
        body = {"model": self.model, "prompt": [list(ids) for ids in asked], **FIELDS}
        body |= {"max_tokens": tokens, "cache_salt": salt or _salt()}
        read = self.server.client.json("/v1/completions", _Completion, body, seconds=ANSWER_S)
        made = [_answer(each.logprobs) for each in read.choices]
        if [sum(map(contains, each.tops, each.tokens)) for each in made] != [tokens] * len(asked):
            what = f"{self.server.base} does not answer with the ids and logprobs of tokens"
            raise KvtuneError(what, "ask vLLM itself: a gateway may change answers")
        cached = (read.usage.prompt_tokens_details or {}).get("cached_tokens")
        self.counts, loaded, end = self.counts or cached is None, 0, time.monotonic() + COUNTED_S
        while before is not None:
            between = Between(before, self.server.scrape())
            queries, local, loaded = (int(between.counted(name) or 0) for name in COUNTERS)
            if queries or time.monotonic() > end:
                cached, loaded = (local + loaded, loaded) if queries == size else (0, 0)
                break
        self.computed -= cached or 0
        return made, cached or 0, loaded


def _answer(logprobs: _Logprobs) -> Answer:
    tops = [{_id(name): min(0.0, max(LEAST, top[name])) for name in top} for top in logprobs.top_logprobs]
    return Answer([_id(name) for name in logprobs.tokens], tops)


def _id(name: str) -> int:
    return int(name.removeprefix("token_id:"))


def _salt() -> str:
    return f"kvtune-{token_hex(8)}"
