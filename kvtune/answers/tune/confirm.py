"""Stage two of tuning: runs stock and the finalists on the real engine until a difference is shown or time is up.

The runs are an experiment (`lab/engine/experiment.py`) with the study's journal. Stock runs at the end, to report how
far its figures have drifted. Of hits a replay has the engine's own: a finalist that has no more than a winner is not
run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path
from time import monotonic

from kvtune.answers.tune.objective import Objective, figure_at
from kvtune.answers.tune.result import Outcome, Role, Trial
from kvtune.answers.tune.trials.run import PlannedTrial, Trials
from kvtune.base.errors import KvtuneError
from kvtune.data.run.file import read_run
from kvtune.data.run.types import Run
from kvtune.lab.engine.experiment import BASELINE, Side, experiment
from kvtune.reading.analysis.comparison.compare import FEWEST, Figure, compare_repeats


@dataclass(slots=True)
class Contender(Side[Run]):
    """Stock or a finalist: its complete `runs`, and all its engine `trials`, failed ones included.

    `replayed`: the score of its replay, where that is the engine's own; None: only the engine tells.
    """

    trials: list[Trial] = field(default_factory=list)
    replayed: float | None = None

    @property
    def role(self) -> Role:
        return "baseline" if self.name == BASELINE else "trial"


@dataclass(frozen=True, slots=True)
class Confirmed:
    """The outcome. `finalists`: those that ran. `leader`: the best of them, with `figures`. `winner`: it, if shown."""

    baseline: Contender
    finalists: tuple[Contender, ...]
    leader: Contender | None
    winner: Contender | None
    figures: tuple[Figure, ...]
    drift: float | None  # relative change of stock's first-token time from its first run to its last
    why: str


@dataclass(slots=True)
class Bout:
    """Makes the engine runs of one study; takes runs of earlier commands from the journal."""

    trials: Trials
    _made: list[Trial] = field(init=False)
    _stock: Contender | None = field(init=False, default=None)
    last: Contender | None = field(init=False, default=None)
    """The side that ran last."""

    def __post_init__(self) -> None:
        self._made = [t for t in self.trials.made if t.on == "engine" and t.state == "complete"]

    def run(
        self,
        sides: Sequence[Contender],
        rounds: int,
        *,
        budget_s: float = inf,
        enough: Callable[[], bool] = lambda: False,
    ) -> None:
        """Run the sides in turns, stock first. Raise KvtuneError if stock fails, KeyboardInterrupt on Ctrl-C."""
        self._stock = sides[0]
        ended = experiment(
            sides,
            rounds,
            self._measure,
            kept=self._kept,
            least=FEWEST,
            budget_s=budget_s,
            enough=enough,
        )
        if ended.error is not None:
            raise ended.error

    def _measure(self, side: Contender) -> Run:
        self._pin()
        self.last = side
        stock = side.role == "baseline" or self.trials.setup.core == "stock"
        (trial,) = self.trials.run([PlannedTrial(side.settings, side.role, stock=stock)], again=True)
        side.trials.append(trial)
        if trial.state != "complete" and side.role == "baseline":
            raise KvtuneError(f"stock vLLM failed: {trial.why}", "make the model run with plain vLLM first")
        if trial.state != "complete":
            raise KvtuneError(trial.why)
        return read_run(Path(trial.run_file))

    def _pin(self) -> None:
        """On a GPU, fix the pool size of stock's first run, as it differs from start to start."""
        if self._stock is not None and self._stock.runs:
            engine = self._stock.runs[0].header.engine
            if engine.device == "cuda":
                self.trials.setup = self.trials.setup.with_pool(engine.num_blocks, engine.block_size)

    def _kept(self, side: Contender) -> Run | None:
        for i, trial in enumerate(self._made):
            if trial.role == side.role and trial.settings == side.settings:
                del self._made[i]
                try:
                    run = read_run(Path(trial.run_file))
                except KvtuneError:
                    return None  # its run file is gone: measure again
                side.trials.append(trial)
                self.last = side
                return run
        return None


def confirm(
    bout: Bout,
    baseline: Contender,
    finalists: Sequence[Contender],
    objective: Objective,
    *,
    rounds: int,
    budget_s: float,
) -> Confirmed:
    """Run two to `rounds` rounds, until a difference is shown or `budget_s` is spent; end with stock; judge.

    Finalists that all have `replayed`, best first, run one after the other, until none that is left can beat a winner.
    """
    count = 1 if all(side.replayed is not None for side in finalists) else len(finalists)
    began = monotonic()
    while True:
        ran, left = finalists[:count], finalists[count:]
        bout.run(
            (baseline, *ran),
            rounds,
            budget_s=budget_s - (monotonic() - began),
            enough=partial(_shown, baseline, ran, objective),
        )
        won = judge(baseline, ran, objective).winner
        best_left = max((side.replayed or 0.0 for side in left), default=-inf)
        if best_left == -inf or (won is not None and best_left <= _mean(won, objective)):
            break
        count += 1
    if bout.last is not baseline or any(each.timed for each in objective.all):
        bout.run((baseline,), len(baseline.runs) + 1)
    return judge(baseline, ran, objective)


def judge(baseline: Contender, finalists: Sequence[Contender], objective: Objective) -> Confirmed:
    """Return the outcome of a confirmation, from confidence intervals over whole runs. Pure."""
    drift = _drift(baseline, "ttft_ms.mean")
    alive = [side for side in finalists if side.runs and not side.failed]
    if not alive:
        why = "no finalist ran on the engine" + (f": {finalists[0].failed}" if finalists else "")
        return Confirmed(baseline, tuple(finalists), None, None, (), drift, why)
    ranked = [(side, figures_of(baseline, side)) for side in alive]
    ranked.sort(key=lambda row: (_wins(row[1], objective), _mean(row[0], objective)), reverse=True)
    leader, figures = ranked[0]
    name = ",".join(objective.names)
    verdicts = {f.path: f for f in figures}
    decisive = [verdicts[o.path] for o in objective.all if o.path in verdicts]
    better = [f for f in decisive if f.verdict == "better"]
    drifts = {o.path: _drift(baseline, o.drift_path) for o in objective.all if o.timed}
    winner: Contender | None = None
    if any(f.verdict == "worse" for f in decisive):
        why = f"the best finalist was worse than stock in {name}"
    elif not better:
        why = f"no difference in {name} was shown between stock and the best finalist"
    elif all(_only_drift(f, drifts.get(f.path)) for f in better):
        drifted = max((drifts[f.path] or 0.0 for f in better), key=abs)
        why = f"the machine drifted by {100 * drifted:+.1f} % meanwhile, as much as the difference: measure again"
    else:
        gained = ", ".join(o.name for o in objective.all if o.path in {f.path for f in better})
        beside = ", worse in none" if objective.beside else ""
        winner, why = leader, f"better than stock in {gained}{beside} with 95 % confidence"
    return Confirmed(baseline, tuple(finalists), leader, winner, figures, drift, why)


def outcome_of(confirmed: Confirmed, objective: Objective) -> Outcome:
    """Return the outcome of a confirmation, as a study stores it."""
    won, leader = confirmed.winner is not None, confirmed.leader
    text = f"no winner: {confirmed.why}"
    if won:
        figure = next(f for f in confirmed.figures if f.path == objective.path)
        text = (
            f"{objective.name} {figure.b:.4g} against stock's {figure.a:.4g} on the engine: {confirmed.why}"
        )
    return Outcome(
        winner=won,
        confirmed=won,
        objective=objective.name,
        objectives=objective.names,
        on="engine",
        text=text,
        drift_ttft=confirmed.drift,
        engine_runs={"baseline": len(confirmed.baseline.runs), "leader": len(leader.runs) if leader else 0},
        figures=confirmed.figures,
    )


def figures_of(baseline: Contender, side: Contender) -> tuple[Figure, ...]:
    """Compare the figures of a side's runs with the figures of stock's runs."""
    return compare_repeats(baseline.runs, side.runs).figures


def _wins(figures: Sequence[Figure], objective: Objective) -> int:
    """Return -1 if an objective is shown to be worse than stock's, else 1 if one is shown to be better, else 0."""
    paths = {o.path for o in objective.all}
    verdicts = [f.verdict for f in figures if f.path in paths]
    return -1 if "worse" in verdicts else int("better" in verdicts)


def _shown(baseline: Contender, finalists: Sequence[Contender], objective: Objective) -> bool:
    """Whether more rounds are useless: one finalist is shown to be better, or all are shown to be worse."""
    alive = [side for side in finalists if side.runs and not side.failed]
    wins = [_wins(figures_of(baseline, side), objective) for side in alive]
    return not wins or max(wins) != 0


def _mean(side: Contender, objective: Objective) -> float:
    scores = [objective.better * figure for _, figure in objective.measured(side.trials)]
    return sum(scores) / len(scores) if scores else float("-inf")


def _only_drift(figure: Figure, drift: float | None) -> bool:
    """Whether the machine drifted by as much as the figure differs from stock's."""
    return drift is not None and figure.relative is not None and abs(drift) >= abs(figure.relative)


def _drift(baseline: Contender, path: str) -> float | None:
    """Return a figure's relative change from stock's first run to its last; None if a run lacks the figure."""
    values = [figure_at(t.summary, path) for t in baseline.trials if t.state == "complete"]
    if len(values) < 2 or not values[0] or not values[-1]:
        return None
    return values[-1] / values[0] - 1
