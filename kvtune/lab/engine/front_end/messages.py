"""Messages from `vllm serve` to the host: files in the work folder, and answers to requests."""

from __future__ import annotations

import msgspec

CONFIG_FILE = "server-config.json"
READY = "ready-"
"""Prefix of a file's name: the API server with pid 42 writes `ready-42` once it answers."""


class ServerConfig(msgspec.Struct, frozen=True):
    """The engine's configuration: `facts` are for the run file."""

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
    """One event of a stream. The last one has `usage` and no choices. If `error` is set, the rest is empty."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Failure | None = None
