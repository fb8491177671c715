"""What `vllm serve` leaves for the host in the work folder, and what its answers say about a request."""

from __future__ import annotations

import msgspec

CONFIG_FILE = "server-config.json"
READY = "ready-"
"""A file of this name plus a process's number: that API server answers."""


class ServerConfig(msgspec.Struct, frozen=True):
    """`facts`: the engine's configuration, for the run file."""

    facts: dict[str, object]
    vocab_size: int


class PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens_details: PromptDetails | None = None


class Choice(msgspec.Struct, frozen=True):
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class Failure(msgspec.Struct, frozen=True):
    message: str = ""


class Chunk(msgspec.Struct, frozen=True):
    """An event of a stream. The last one has `usage` and no choice; `error` takes the place of all others."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Failure | None = None
