"""What `kvtune diff` answers: plain data, its `--json`."""

from __future__ import annotations

import msgspec

from kvtune.answers.diff.answers import Figures
from kvtune.data.tally import Tally

Value = bool | int | float | str | list[str | float]


class OfModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model under both versions. `differs`: the figures that do, old and new; `failed`: why not all is known."""

    model: str
    old: Figures | None
    new: Figures | None
    differs: dict[str, tuple[Value, Value]]
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

    The times are means at one nominal cost of steps, the same for both versions: they compare, and are no device's.
    """

    preemptions: int
    tokens_computed_twice: int
    steps: int
    requests_in_a_step: float
    prefill_tokens: int
    decode_tokens: int
    first_token_ms: float
    token_gap_ms: float

    @property
    def percent(self) -> float:
        return 100 * (self.rate or 0.0)


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
    old: Replayed | None = None
    new: Replayed | None = None
    partings: list[Parting] = []
    failed: list[str] = []


class Diff(msgspec.Struct, frozen=True, kw_only=True):
    """`old`, `new`: the versions; no `models`: they are one, and nobody was asked. `missed`: what one of them could
    not be asked, whatever the model.

    `defaults`: of flags, and what vLLM resolves for each model. `broken`: limits of --fail-on that are met.
    """

    schema: int = 1
    old: str
    new: str
    device: str
    missed: list[str] = []
    models: list[OfModel] = []
    defaults: list[Moved] = []
    names: list[Names] = []
    load: Load | None = None
    broken: list[str] = []
