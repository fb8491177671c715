"""A version of vLLM: what it answers to the questions that `child.py` asks in its environment. Plain data."""

from __future__ import annotations

import msgspec

PREFIX_TOKENS, SUFFIX_TOKENS, VISITS = 6000, 200, 3
"""The prompts that each model is asked with: one prefix, with another suffix at each visit."""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What a version makes of a model on the device.

    `hits`: percent of a prompt's tokens that hit when a prefix comes back with another suffix, at its second visit and
    at its third. `pool_tokens`: in requests of the longest length; 0: only an engine knows. `gpus`: for one replica.
    """

    gpus: int
    groups: list[str]
    block: int
    hit_unit: int
    hits: list[float]
    pool_tokens: int
    concurrency: float
    caching: bool
    retention: str
    chunk: int
    seats: int


class Flag(msgspec.Struct, frozen=True, kw_only=True):
    """A flag of `vllm serve`: its default, its name in Python, and what it says it does."""

    default: str
    dest: str
    help: str = ""


class OfVersion(msgspec.Struct, frozen=True, kw_only=True, tag="version"):
    """What a version names, whatever the model. `missed`: what it could not be asked, with the reason."""

    version: str
    site: str = ""
    flags: dict[str, Flag] = {}
    variables: dict[str, str] = {}
    metrics: list[str] = []
    events: dict[str, list[str]] = {}
    missed: list[str] = []


class OfModel(msgspec.Struct, frozen=True, kw_only=True, tag="model"):
    """What a version makes of a model. `settings`: vLLM's resolved configuration."""

    model: str
    settings: dict[str, str] = {}
    figures: Figures | None = None
    missed: list[str] = []


class Answers(msgspec.Struct, frozen=True, kw_only=True):
    version: OfVersion
    models: dict[str, OfModel]
