"""What `kvtune diff` answers: plain data, its `--json`."""

from __future__ import annotations

import msgspec

SCHEMA = 1


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One of the two versions. `missed`: what it could not be asked, with the reason."""

    named: str
    version: str
    missed: list[str] = []


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


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """A load under one version's scheduler. `misses`: prompt tokens by cause."""

    prompt_tokens: int
    hit_tokens: int
    misses: dict[str, int]
    preemptions: int
    computed_twice: int
    steps: int

    @property
    def hit_percent(self) -> float:
        return 100 * self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class Parting(msgspec.Struct, frozen=True, kw_only=True):
    """Where the versions part: the first request, or step, of which they make something else."""

    what: str
    number: int
    old: str
    new: str


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """A load through both schedulers. `symbols`: what of vLLM's scheduler and cache changed between them."""

    workload: str
    model: str
    old: Replayed | None
    new: Replayed | None
    partings: list[Parting] = []
    symbols: list[str] = []
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
