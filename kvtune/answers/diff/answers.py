"""A version of vLLM: what it answers to the questions that `child.py` asks in its environment. Plain data."""

from __future__ import annotations

import msgspec

from kvtune.lab.setup.setup import Setup

PREFIX_TOKENS, SUFFIX_TOKENS = 6000, 200
"""The prompts that each model is asked with: one prefix, with another suffix at each visit."""
NODE = 8
"""GPUs in a node. A model that needs more has its layers spread over nodes."""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What a version makes of a model on the device.

    `hits`: percent of a prompt's tokens that hit when a prefix comes back with another suffix, at its second visit and
    at its third. `pool_tokens`: in requests of the longest length; 0: only an engine knows. `idle_tokens`: of the
    longest idle conversations that `doctor` sends, how many stay hittable. `gpus`: for one replica.
    """

    gpus: int
    groups: list[str]
    block: int
    hit_unit: int
    hits: list[float]
    pool_tokens: int
    idle_tokens: int
    concurrency: float
    prefix_caching: bool
    retention: str
    chunk: int
    seats: int


class OfVersion(msgspec.Struct, frozen=True, kw_only=True, tag="version"):
    """What a version names, whatever the model: of each kind names, with their defaults where they have one.

    `missed`: what it could not be asked, with the reason.
    """

    version: str
    site: str = ""
    names: dict[str, dict[str, str]] = {}
    missed: list[str] = []


class ModelReply(msgspec.Struct, frozen=True, kw_only=True, tag="model"):
    """What a version makes of a model. `settings`: vLLM's resolved configuration."""

    model: str
    settings: dict[str, str] = {}
    figures: Figures | None = None
    missed: list[str] = []


class Answers(msgspec.Struct, frozen=True, kw_only=True):
    version: OfVersion
    models: dict[str, ModelReply]


def on_gpus(setup: Setup, gpus: int) -> Setup:
    """Return the set-up with its model spread over this many GPUs."""
    if gpus == 1:
        return setup
    nodes = {"pipeline_parallel_size": gpus // NODE} if gpus > NODE else {}
    return setup.with_flags(tensor_parallel_size=min(gpus, NODE), **nodes)
