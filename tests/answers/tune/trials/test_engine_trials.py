"""Trials on the engine, with a stand-in for the run: what fails is kept with its cause, and the study goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtune.answers.tune import sweep as sweeps
from kvtune.answers.tune.confirm import Bout, Contender, confirm
from kvtune.answers.tune.objective import OBJECTIVES
from kvtune.answers.tune.result import Trial
from kvtune.answers.tune.trials.journal import StudyJournal
from kvtune.answers.tune.trials.run import Trials
from kvtune.base.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, KvtuneError, UsageError
from kvtune.data.run.file import read_run
from kvtune.lab.engine.profile import Profiled
from kvtune.lab.lab import Lab
from kvtune.lab.setup.setup import Load, Setup
from kvtune.reading.analysis.rebuild import workload_of
from tests.labs import FakeLab

GOLDEN = Path(__file__).parents[3] / "golden" / "schema1-real.kvrun"
RUN = read_run(GOLDEN)
_WORK = workload_of(RUN)
assert _WORK is not None
WORK = _WORK
BENCH = Setup(
    model="tiny-gemma3",
    load=Load(spec=WORK.spec, seed=WORK.seed, hash=WORK.hash),
    vllm="0.32.0",
    core="kvtune",
)
BY = OBJECTIVES["hit-rate"]


class Engines:
    """Answers each job with the golden run, or with the failure that its settings were given."""

    def __init__(self) -> None:
        self.jobs: list[Setup] = []
        self.lab = FakeLab(self)
        self.fails: dict[int, Exception] = {}

    def __call__(self, setup: Setup, output: Path) -> Profiled:
        self.jobs.append(setup)
        error = self.fails.get(setup.core_settings.get("slack", -1))
        if isinstance(error, UsageError):
            raise error
        return Profiled(RUN, GOLDEN, error if isinstance(error, KvtuneError) else None)


@pytest.fixture
def engines() -> Engines:
    return Engines()


def sweep(lab: Lab, path: Path, values: list[int], seen: list[Trial]) -> list[Trial]:
    asked = sweeps.planned_trials(BENCH, [{"slack": value} for value in values])
    with StudyJournal(path, "sweep", BENCH) as journal:
        sweeps.run(BENCH, asked, journal, seen.append, lab, output=path.parent)
        return list(journal.trials)


def test_a_trial_that_fails_is_kept_with_its_cause_and_the_sweep_goes_on(
    engines: Engines, tmp_path: Path
) -> None:
    engines.fails[2] = KvtuneError("EngineCore died: out of memory", "give it less", EXIT_FAILED)
    engines.fails[3] = UsageError("vLLM does not take it", "take another")
    path = tmp_path / "a.jsonl"
    result = sweep(engines.lab, path, [1, 2, 3, 4], [])
    assert [(t.role, t.state) for t in result] == [
        ("baseline", "complete"),
        ("trial", "complete"),
        ("trial", "failed"),
        ("trial", "failed"),
        ("trial", "complete"),
    ]
    assert result[2].why == "EngineCore died: out of memory"
    assert result[3].why == "vLLM does not take it (take another)"
    outcome = sweeps.result(result, BY)
    assert [t.state for t in outcome.trials] == ["complete", "failed", "failed", "complete"]
    assert outcome.best is not None and outcome.best.number in (1, 4)
    again: list[Trial] = []
    assert [t.why for t in sweep(engines.lab, path, [1, 2, 3, 4], again)] == [t.why for t in result]
    assert again == [], "the same command makes nothing again"


def test_a_stopped_trial_is_not_journalled(engines: Engines, tmp_path: Path) -> None:
    engines.fails[2] = KvtuneError("interrupted", "", EXIT_INTERRUPTED)
    seen: list[Trial] = []
    with pytest.raises(KeyboardInterrupt):
        sweep(engines.lab, tmp_path / "a.jsonl", [1, 2, 3], seen)
    assert len(seen) == 2
    del engines.fails[2]
    assert len(sweep(engines.lab, tmp_path / "a.jsonl", [1, 2, 3], seen)) == 4
    assert len(seen) == 4


def test_stock_that_cannot_run_ends_the_sweep(tmp_path: Path) -> None:
    def refused(setup: Setup, output: Path) -> Profiled:
        raise UsageError("no such flag", "leave it out")

    with pytest.raises(UsageError, match="no such flag") as caught:
        sweep(FakeLab(refused), tmp_path / "a.jsonl", [1], [])
    assert caught.value.exit_code == EXIT_USAGE


def test_every_trial_failed_is_a_failure(engines: Engines, tmp_path: Path) -> None:
    engines.fails = {1: KvtuneError("too small", ""), 2: KvtuneError("too large", "")}
    with pytest.raises(KvtuneError, match="every trial failed: too small"):
        sweeps.fail_if_none(sweep(engines.lab, tmp_path / "a.jsonl", [1, 2], []))


def test_a_finalist_that_fails_leaves_the_others(engines: Engines, tmp_path: Path) -> None:
    engines.fails[1] = KvtuneError("EngineCore died", "", EXIT_FAILED)
    with StudyJournal(tmp_path / "a.jsonl", "tune", BENCH) as journal:
        bout = Bout(Trials(BENCH, journal, lab=engines.lab, output=tmp_path))
        sides = [Contender("trial", {"slack": 1}), Contender("trial", {"slack": 2})]
        confirmed = confirm(bout, Contender("baseline", {}), sides, BY, rounds=2, budget_s=1e9)
        assert confirmed.leader is sides[1] and confirmed.winner is None, (
            "the same run on both sides is no gain"
        )
        assert sides[0].failed == "EngineCore died"
        states = [(t.role, t.state) for t in journal.trials]
    assert states.count(("trial", "failed")) == 1
    assert states.count(("baseline", "complete")) == 2, "stock first and last"
    engines.jobs.clear()
    with StudyJournal(tmp_path / "a.jsonl", "tune", BENCH) as journal:
        bout = Bout(Trials(BENCH, journal, lab=engines.lab, output=tmp_path))
        sides = [Contender("trial", {"slack": 2})]
        confirm(bout, Contender("baseline", {}), sides, BY, rounds=2, budget_s=1e9)
    assert engines.jobs == [], "a study that is resumed takes the runs that it has"


@pytest.mark.parametrize("core", ["kvtune", "stock"])
def test_a_trial_of_the_core_never_runs_stock_unseen(engines: Engines, tmp_path: Path, core: str) -> None:
    sweep(engines.lab, tmp_path / "a.jsonl", [1], [])
    made = zip(engines.jobs, engines.lab.environments, strict=True)
    strict = [environment.get("KVTUNE_STRICT") for job, environment in made if job.core == core]
    assert strict == (["1"] if core == "kvtune" else [None])
