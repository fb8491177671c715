"""A study of settings as data: the trials of a sweep or a search, and the outcome.

`kvtune.answers.tune` makes these, `kvtune.reading.report` and the command line draw them. Plain data; no I/O.
"""

from __future__ import annotations

import json
from typing import Any, Literal, NamedTuple

import msgspec

from kvtune.data.recipe import Scalar
from kvtune.data.run.signature import identity
from kvtune.lab.setup.setup import CoreName, Setup
from kvtune.reading.analysis.comparison.compare import Figure

SCHEMA = 1
Settings = dict[str, Scalar]
Place = Literal["sim", "engine"]
Role = Literal["trial", "baseline"]
Kind = Literal["sweep", "tune", "verify"]


def study_identity(kind: Kind, setup: Setup) -> str:
    """Return the identity that a study's files carry (`kvtune/data/run/signature.py`)."""
    return identity("study", kind, setup.filed())


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One setting, run once. `core` is stock for the baseline; `summary` is the run's `--json` object, or empty."""

    number: int
    settings: Settings
    on: Place
    core: CoreName = "kvtune"
    role: Role = "trial"
    state: Literal["complete", "partial", "failed"] = "complete"
    why: str = ""
    elapsed_s: float = 0.0
    run_file: str = ""
    seed: int = 0
    summary: dict[str, Any] = {}

    @property
    def key(self) -> str:
        """A key that is equal for trials that do the same work."""
        return json.dumps([self.on, self.core, self.role, self.settings], sort_keys=True)

    def to_json(self) -> dict[str, object]:
        """Return the run's fields and the trial's own fields in one flat object."""
        fields = msgspec.to_builtins(self)
        fields.pop("summary")
        return {**self.summary, **fields}


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a setting beat stock. `sweep` leaves the confirmation's fields unset, `tune` leaves `best` unset."""

    winner: bool = False
    confirmed: bool = False
    objective: str = ""
    objectives: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    on: Place = "sim"
    best: float | msgspec.UnsetType | None = msgspec.UNSET
    baseline: float | msgspec.UnsetType = msgspec.UNSET
    text: str = ""
    drift_ttft: float | msgspec.UnsetType | None = msgspec.UNSET
    engine_runs: dict[str, int] | msgspec.UnsetType = msgspec.UNSET
    figures: tuple[Figure, ...] | msgspec.UnsetType = msgspec.UNSET


class Finalist(msgspec.Struct, frozen=True, kw_only=True):
    """A setting that was compared with stock on the engine. `figures` compare all its runs with all of stock's."""

    settings: Settings
    winner: bool = False
    failed: str = ""
    trials: tuple[int, ...] = ()
    run_files: tuple[str, ...] = ()
    figures: tuple[Figure, ...] = ()


class StudyResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result that `sweep` and `tune` print with `--json` and keep in a file. `pareto`: numbers of trials."""

    kind: Kind
    objective: str
    objectives: tuple[str, ...]
    trials: tuple[Trial, ...]
    best: Trial | None
    baseline: Trial | None
    finalists: tuple[Finalist, ...] = ()
    pareto: tuple[int, ...] = ()
    verdict: Outcome
    recipe: str | None = None
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, object]:
        return {
            "schema": SCHEMA,
            **msgspec.structs.asdict(self),
            "trials": [trial.to_json() for trial in self.trials],
            "best": self.best.to_json() if self.best else None,
            "baseline": self.baseline.to_json() if self.baseline else None,
        }


class ValueMean(NamedTuple):
    """The mean figure of some trials at one value of a knob."""

    value: Scalar
    mean: float
    trials: int


class Effect(msgspec.Struct, frozen=True):
    """The effect of one knob: its values in the order in which they were first tried."""

    knob: str
    means: tuple[ValueMean, ...]

    @property
    def spread(self) -> float:
        figures = [each.mean for each in self.means]
        return max(figures) - min(figures) if figures else 0.0


class EngineRuns(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the page's table of finalists. `values`: the objective in each engine run of a setting.

    `figure` compares these runs with stock's; if it is None, `why` gives the reason.
    """

    settings: Settings
    core: CoreName
    values: tuple[float, ...]
    figure: Figure | None = None
    why: str = ""

    @property
    def mean(self) -> float | None:
        return sum(self.values) / len(self.values) if self.values else None


class StudyView(msgspec.Struct, frozen=True, kw_only=True):
    """A study as its page shows it: the result, and what is computed from the journal for tables and charts."""

    setup: Setup
    result: StudyResult
    drawn_on: Place
    """Engine or simulator, whichever completed more trials: charts show only its trials."""
    tied: int = 0
    """Simulated trials with the figures of the best one, itself among them."""
    best_flags: tuple[str, ...] = ()
    """vLLM's flags of the best trial."""
    effects: tuple[Effect, ...] = ()
    front: tuple[int, ...] = ()
    """Numbers of the trials on the Pareto front over `axes`."""
    axes: tuple[str, ...] = ()
    engine_runs: tuple[EngineRuns, ...] = ()
    """Stock first, then each setting that was run on the engine more than once."""
    why: str = ""
    """The reason for the verdict over `engine_runs`."""
    drift_ttft: float | None = None
    """Relative change of stock's first-token time from its first engine run to its last."""
    recipe_text: str = ""
