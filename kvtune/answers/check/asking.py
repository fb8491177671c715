"""Asks a server for greedy answers with logprobs; what each prompt hit, its answer says, or the counters do."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from kvtune.answers.check.judge import Answer
from kvtune.answers.check.paths import ENDS, Layout, Prompt, length, records
from kvtune.base.errors import KvtuneError
from kvtune.servers.watch.endpoints import host_of
from kvtune.servers.watch.facts import LOCAL, ShapeAtHand
from kvtune.servers.watch.metrics import Between
from kvtune.servers.watch.server import Server

ANSWER_S, COUNTED_S = 600.0, 2.0
"""Most seconds of an answer, and until the counters have it."""
LEAST = -100.0
"""Taken for lower logprobs: vLLM writes -9999 for minus infinity."""
RANDOM_IDS = (10, 400)
"""Token ids of prompts where the server reads no text: every vocabulary has them."""
COUNTERS = ("prefix_cache_queries", "prefix_cache_hits", "external_prefix_cache_hits")
FIELDS = {"temperature": 0.0, "logprobs": 5, "ignore_eos": True, "return_tokens_as_token_ids": True}


class _Cached(msgspec.Struct):
    cached_tokens: Annotated[int, Meta(ge=0)] | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Cached | None = None


class _Logprobs(msgspec.Struct):
    tokens: list[str]
    top_logprobs: list[dict[str, float]]


class _Choice(msgspec.Struct):
    index: int
    logprobs: _Logprobs


class _Completion(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage


class Heard(NamedTuple):
    """An answer, and the tokens of its prompt that were cached; of them, those that a connector `loaded`."""

    answer: Answer
    cached: int
    loaded: int = 0


def layout_of(server: Server, shape_at_hand: ShapeAtHand) -> tuple[Layout, str]:
    """Return what the server says of its cache, and its model's name. `shape_at_hand`: knows a model's window."""
    scrape, card = server.scrape(), server.card()
    block = scrape.block_size
    if scrape.cache.get("enable_prefix_caching") == "False" or not block:
        raise KvtuneError(f"prefix caching is off at {server.base}: nothing hits", "--enable-prefix-caching")
    if card.max_model_len and card.max_model_len < 6 * ENDS:
        raise KvtuneError(
            f"{server.base} takes {card.max_model_len} tokens: too few for a hit", "check another"
        )
    names = [name for name in (card.root, card.id) if name]
    shapes = [shape_at_hand(name, host_of(server.base) in LOCAL) for name in names]
    offloads = scrape.cache.get("kv_offloading_size", "None") != "None"
    layout = Layout(
        blocks=sorted({block, scrape.match_unit or block}),
        window=max((shape.window for shape in shapes if shape and shape.window_layers), default=0),
        pool=scrape.number("kv_cache_size_tokens") or 0,
        longest=card.max_model_len or 0,
        tier=offloads or bool(scrape.get("external_prefix_cache_queries")),
    )
    return layout, card.id


def prompts(server: Server, layout: Layout, count: int, seed: int) -> list[Prompt]:
    """Make prompts: a register, then its first or last line again without the number, on which the answer hangs.

    Random ids if the server reads no text.
    """
    draw, made = Random(seed), []
    for number in range(count):
        tokens = length(layout, number)
        lines = records(draw, tokens // 12)
        text = [f"{start} {code}." for start, code in lines]
        try:
            last = server.tokenized({"prompt": f"\n{text[-1]}\n{lines[-(number % 2)][0]}"})
            ids = [*server.tokenized({"prompt": "\n".join(text[:-1])})[: tokens - len(last)], *last]
        except KvtuneError:
            ids = [draw.randrange(*RANDOM_IDS) for _ in range(tokens)]
        made.append(Prompt(number, ids))
    return made


@dataclass
class Asker:
    """`sent`: requests so far; `computed`: their prompt tokens that missed. `counts`: counters tell what hits."""

    server: Server
    model: str
    counts: bool = False
    sent: int = 0
    computed: int = 0

    def ask(self, ids: Sequence[int], salt: str, tokens: int = 1) -> Heard:
        """Ask alone. What is `cached` is 0 if the server does not say it, or answered others meanwhile."""
        before = self.server.scrape() if self.counts else None
        (answer,), cached = self.answers([ids], salt, tokens)
        self.counts, loaded, end = self.counts or cached is None, 0, time.monotonic() + COUNTED_S
        while before is not None:
            between = Between(before, self.server.scrape())
            queries, local, loaded = (int(between.counted(name) or 0) for name in COUNTERS)
            if queries or time.monotonic() > end:
                cached, loaded = (local + loaded, loaded) if queries == len(ids) else (0, 0)
                break
        self.computed -= cached or 0
        return Heard(answer, cached or 0, loaded)

    def answers(
        self, asked: Sequence[Sequence[int]], salt: str, tokens: int
    ) -> tuple[list[Answer], int | None]:
        """Send prompts that are computed together. Return their answers, and the tokens that hit if it says."""
        self.sent, self.computed = self.sent + 1, self.computed + sum(map(len, asked))
        body = {"model": self.model, "prompt": [list(ids) for ids in asked], **FIELDS}
        read = self._sent({**body, "max_tokens": tokens, "cache_salt": salt})
        try:
            made = [_answer(each) for each in sorted(read.choices, key=lambda choice: choice.index)]
            if len(made) != len(asked):
                raise ValueError("as many prompts have no answer")
        except ValueError:
            what = "does not answer with the ids and logprobs of tokens"
            raise KvtuneError(
                f"{self.server.base} {what}", "ask vLLM itself: a gateway may change answers"
            ) from None
        details = read.usage.prompt_tokens_details
        return made, details.cached_tokens if details else None

    def _sent(self, body: dict[str, Any]) -> _Completion:
        return self.server.client.json("/v1/completions", _Completion, body, seconds=ANSWER_S)

    def emptied(self) -> bool:
        """Whether the server has emptied its cache: only with VLLM_SERVER_DEV_MODE=1."""
        with contextlib.suppress(KvtuneError):
            self.server.client.ask("/reset_prefix_cache", {})
            return True
        return False


def _answer(choice: _Choice) -> Answer:
    """Return an answer of ids. ValueError if its tokens are text, or not among the first of their place."""
    rows = [
        {_id(name): min(0.0, max(LEAST, value)) for name, value in top.items()}
        for top in choice.logprobs.top_logprobs
    ]
    tokens = [_id(name) for name in choice.logprobs.tokens]
    if any(token not in row for token, row in zip(tokens, rows, strict=True)):
        raise ValueError("a token has no logprob")
    return Answer(tokens, rows)


def _id(name: str) -> int:
    return int(name.removeprefix("token_id:"))


class Priced(Asker):
    """Sends nothing: counts what a check would send, at most."""

    def _sent(self, body: dict[str, Any]) -> _Completion:
        empty = _Logprobs([], [])
        return _Completion([_Choice(0, empty) for _ in body["prompt"]], _Usage(_Cached(0)))

    def emptied(self) -> bool:
        return False
