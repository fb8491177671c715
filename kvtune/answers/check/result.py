"""What `kvtune check` answers: plain data, its `--json`; and the bundle, which another call can run again."""

from __future__ import annotations

import msgspec

from kvtune.answers.check.common import Common
from kvtune.answers.check.judge import Answer, Verdict
from kvtune.answers.check.paths import Layout, Prompt


class OfPath(msgspec.Struct, frozen=True, kw_only=True):
    """A path's hits. `hits`: of `asked` requests, those that were proved to take it; `equal`: with the cold tokens.

    `nats`: the largest distance from a cold answer.
    """

    name: str
    title: str
    verdict: Verdict = "not shown"
    why_not: str = ""
    asked: int = 0
    hits: int = 0
    wrong: int = 0
    equal: int = 0
    nats: float = 0.0
    seen_with: float = 0.0
    more: int = 0


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """`cold`: cold answers compared with each other; `exchanged`: answers to prompts with a block of another one.

    `unsalted`: requests with a fresh cache_salt that hit all the same. `bundle`: the file that runs it again.
    """

    schema: int = 1
    url: str
    model: str
    version: str
    verdict: Verdict
    requests: int
    computed_tokens: int
    layout: Layout
    limit_nats: float
    unsalted: int
    cold: OfPath
    exchanged: OfPath
    paths: list[OfPath]
    common: list[Common]
    bundle: str = ""


class Compared(msgspec.Struct, frozen=True):
    """A request's answer beside the cold one. `taken`: it is proved to be a hit of its path. `age`: requests since."""

    path: str
    number: int
    ids: list[int]
    cold: Answer
    answer: Answer
    nats: float
    taken: bool = True
    cached: int = 0
    age: int = 0


class Bundle(msgspec.Struct, frozen=True):
    """`salts`: of the prompts' first cold requests, whose blocks a tier may still have after a restart."""

    kvtune: str
    tokens: int
    answer: Check
    prompts: list[Prompt]
    salts: list[str]
    compared: list[Compared]
