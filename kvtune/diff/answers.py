"""What a version of vLLM is asked, and what it answers. Plain data, on both sides of the pipe."""

from __future__ import annotations

import msgspec

from kvtune.doctor.facts import Facts
from kvtune.engine.setup import Setup

PREFIX_TOKENS, SUFFIX_TOKENS, VISITS = 6000, 200, 3
"""The prompts that each model is asked with: one prefix, with another suffix at each visit."""


class Question(msgspec.Struct, frozen=True, kw_only=True):
    setups: list[Setup]


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
    """What a version makes of a model. `why`: why some of it is not known. `gpus`: over how many it was spread to fit.

    `settings`: vLLM's resolved configuration. `hits`: the hit tokens of each visit, of prompts of `prompt` tokens.
    """

    model: str
    why: str = ""
    gpus: int = 1
    settings: dict[str, str] = {}
    facts: Facts | None = None
    prompt: int = 0
    hits: list[int] = []


class Answers(msgspec.Struct, frozen=True, kw_only=True):
    version: OfVersion
    models: dict[str, OfModel]
