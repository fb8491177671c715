"""What kvtune asks a running server, and what it takes of the answers: GET, /tokenize and /detokenize only.

In: a URL as a user types it. An answer that is wrong raises KvtuneError with one next step.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from kvtune.base.bounded import BeyondError, TooLongError
from kvtune.base.errors import KvtuneError, UsageError
from kvtune.data.show.terminal import one_line
from kvtune.requests.log.anthropic import moved
from kvtune.requests.log.bodies import LOG_IDS, MESSAGES, READ, Body, body_of, refuse_elsewhere
from kvtune.requests.log.conversation import as_chat, template_flags
from kvtune.servers.watch import metrics
from kvtune.servers.watch.client import Client, SilentError, base_of
from kvtune.servers.watch.endpoints import Source, sources
from kvtune.servers.watch.metrics import MOST, Scrape

NOT_VLLM = "another kind of server, or one that was started with --disable-log-stats"
INFO = "/server_info?config_format=json"
LONGEST_MODEL = 1 << 31
"""Largest max_model_len in tokens that is believed."""


Kind = TypeVar("Kind")


class _Version(msgspec.Struct):
    version: Annotated[str, Meta(max_length=100)] = ""


class Card(msgspec.Struct):
    """A model that the server serves, by the name `id`. `root`: the folder or name that it was loaded from."""

    id: Annotated[str, Meta(max_length=1000)] = ""
    root: Annotated[str, Meta(max_length=1000)] | None = None
    max_model_len: Annotated[int, Meta(ge=0, le=LONGEST_MODEL)] | None = None


class _Models(msgspec.Struct):
    data: list[Card] = []


class _Scheduler(msgspec.Struct):
    max_num_seqs: Annotated[int, Meta(ge=0, le=MOST)] = 0
    max_num_batched_tokens: Annotated[int, Meta(ge=0, le=MOST)] = 0
    max_num_scheduled_tokens: Annotated[int, Meta(ge=0, le=MOST)] | None = None


class _Config(msgspec.Struct):
    scheduler_config: _Scheduler = msgspec.field(default_factory=_Scheduler)


class _Info(msgspec.Struct):
    vllm_config: _Config = msgspec.field(default_factory=_Config)


class _Tokens(msgspec.Struct):
    tokens: list[Annotated[int, Meta(ge=0, lt=1 << 32)]] | None = None


class _Text(msgspec.Struct):
    prompt: str = ""


@dataclass
class Server:
    """A client of one server. `headers` are sent with every request. `insecure`: certificates are not checked."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    insecure: bool = False

    def __post_init__(self) -> None:
        self.base = base_of(self.url)
        self.client = Client(self.base, self.headers, self.insecure)

    def close(self) -> None:
        self.client.close()

    def scrape(self) -> Scrape:
        text = self.client.ask("/metrics").decode(errors="replace")
        try:
            scrape = metrics.read(text, time.time())
        except metrics.UNREADABLE as error:
            limits = metrics.WrongValue, BeyondError, TooLongError
            detail = f": {one_line(str(error))[:200]}" if isinstance(error, limits) else ""
            raise KvtuneError(f"{self.base}/metrics is not in Prometheus' format{detail}", NOT_VLLM) from None
        if not scrape.values:
            raise KvtuneError(f"{self.base}/metrics has no series of vLLM", f"it is {NOT_VLLM}")
        return scrape

    def version(self) -> str:
        """Return the server's version; empty if it does not say it."""
        return one_line(self._asked("/version", _Version).version)

    def card(self) -> Card:
        """Return what the server says of its model; an empty card if it says nothing."""
        cards = self._asked("/v1/models", _Models).data
        return cards[0] if cards else Card()

    def longest(self) -> int:
        """Return the model's max_model_len in tokens; 0 if the server does not report it."""
        return self.card().max_model_len or 0

    def scheduler_limits(self, seconds: float) -> tuple[int, int] | None:
        """Return max_num_seqs and the tokens of a step; 0 if the server does not say them, None if it takes longer.

        Only with VLLM_SERVER_DEV_MODE=1. At the first question vLLM looks at its whole environment, for seconds.
        """
        try:
            config = self.client.json(INFO, _Info, seconds=seconds).vllm_config.scheduler_config
        except SilentError:
            return None
        except KvtuneError:
            return 0, 0
        return config.max_num_seqs, config.max_num_scheduled_tokens or config.max_num_batched_tokens

    def event_sources(self) -> dict[int, Source]:
        """Return the event sources by rank; empty if events are off, or if vLLM (before 0.31) cannot name them."""
        return sources(self._asked("/kv_event_sources", dict[str, Any]))

    def tokenized(self, given: Mapping[str, Any] | Body) -> list[int]:
        """Return the token ids of a request's body, as the server renders it."""
        body = body_of(given)
        if body.is_chat:
            if body.api == MESSAGES and moved(body):
                raise UsageError(
                    "has a system message between others, and /tokenize does not say where the server puts it",
                    f"name the model's tokenizer with --tokenizer, or {LOG_IDS}",
                )
            chat = as_chat(body)
            kept = ("messages", "tools", "chat_template", "continue_final_message")
            asked = {name: chat[name] for name in kept if chat.get(name)}
            asked["add_generation_prompt"] = chat.get("add_generation_prompt", True)
            asked["chat_template_kwargs"] = template_flags(chat)  # /tokenize has no fields for these
        else:
            refuse_elsewhere(body)
            asked = {name: body.fields[name] for name in READ[body.api] if name in body.fields}
        tokens = self.client.json("/tokenize", _Tokens, asked).tokens
        if tokens is None:
            raise KvtuneError(
                f"{self.base}/tokenize gave no tokens", 'log token ids: "return_token_ids": true'
            )
        return tokens

    def text_of(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids; empty if the server has no tokenizer."""
        try:
            return self.client.json("/detokenize", _Text, {"tokens": list(tokens)}).prompt
        except KvtuneError:
            return ""

    def _asked(self, path: str, kind: type[Kind]) -> Kind:
        """Return the JSON at a path; the empty one if the server cannot be reached, or answers anything else."""
        try:
            return self.client.json(path, kind)
        except KvtuneError:
            return kind()
