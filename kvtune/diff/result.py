"""What `kvtune diff` answers: plain data, its `--json`."""

from __future__ import annotations

import msgspec

from kvtune.diff.answers import Figures
from kvtune.tally import Tally

SCHEMA = 1


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One of the two versions. `missed`: what it could not be asked, with the reason."""

    named: str
    version: str
    missed: list[str] = []


class OfModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model under both versions. `differs`: the figures that do; `failed`: why a version does not know all."""

    model: str
    old: Figures | None
    new: Figures | None
    differs: list[str]
    failed: list[str]


class Moved(msgspec.Struct, frozen=True, kw_only=True):
    """A setting that nobody sets, and that has another value. `models`: for which; empty: whatever the model."""

    setting: str
    old: str
    new: str
    models: list[str] = []


class Names(msgspec.Struct, frozen=True, kw_only=True):
    """Names that one of the versions does not have. `renamed`: old name to new name."""

    of: str
    gone: list[str]
    new: list[str]
    renamed: dict[str, str]


class Replayed(Tally, frozen=True, kw_only=True):
    """A load under one version's scheduler.

    `step_requests`: mean number of requests in a step. `first_ms`, `gap_ms`: means, at one nominal cost of steps that
    both versions have: they compare, and are no device's times.
    """

    preemptions: int
    computed_twice: int
    steps: int
    step_requests: float
    prefill_tokens: int
    decode_tokens: int
    first_ms: float
    gap_ms: float


class Parting(msgspec.Struct, frozen=True, kw_only=True):
    """Where the versions part: the first request, or step, of which they make something else.

    `symbols`: what changed in the part of vLLM that decides it.
    """

    what: str
    number: int
    old: str
    new: str
    symbols: list[str] = []


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """A load through both schedulers."""

    workload: str
    model: str
    old: Replayed | None = None
    new: Replayed | None = None
    partings: list[Parting] = []
    failed: list[str] = []


class Diff(msgspec.Struct, frozen=True, kw_only=True):
    """`defaults`: of flags, and what vLLM resolves for each model. `broken`: limits of --fail-on that are met."""

    schema: int = SCHEMA
    old: Side
    new: Side
    device: str
    models: list[OfModel]
    defaults: list[Moved]
    names: list[Names]
    load: Load | None = None
    broken: list[str] = []
