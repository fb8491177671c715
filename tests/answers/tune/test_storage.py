"""A study in a real PostgreSQL: several workers, another bench, a server that goes away in mid-study and comes back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from kvtune.answers.tune.objective import OBJECTIVES, axes, front, objective
from kvtune.answers.tune.result import Trial
from kvtune.answers.tune.search import SearchSettings, search
from kvtune.answers.tune.space.grid import shown
from kvtune.answers.tune.storage import TRIAL, OptunaStudy
from kvtune.answers.tune.trials.journal import StudyJournal
from kvtune.answers.tune.trials.run import Answer, PlannedTrial, Trials
from kvtune.base.errors import KvtuneError, UsageError
from kvtune.lab.setup.setup import Load, Setup
from tests.answers.tune.postgres import Cluster
from tests.answers.tune.trials.answering import answered

SPACE = {"slack": tuple(range(40)), "windows": tuple(range(20))}
BY = OBJECTIVES["hit-rate"]


class Simulator:
    """Answers at once, by arithmetic: the storage is under test, not vLLM."""

    def __init__(self) -> None:
        self.on_submit: Callable[[], None] = lambda: None
        self.asked: Counter[str] = Counter()
        """Trials of each worker, by its journal."""

    def answer(self, trials: Trials, plan: PlannedTrial) -> Answer:
        assert trials._journal is not None
        self.asked[trials._journal.path.name] += 1
        self.on_submit()
        slack, windows = (int(plan.settings.get(name, 0)) for name in ("slack", "windows"))
        return Answer({"core": {"active": True}, "prefix_cache": {"hit_rate": (slack + windows) / 100}})


@pytest.fixture(autouse=True)
def simulator(monkeypatch: pytest.MonkeyPatch) -> Simulator:
    made = Simulator()
    answered(monkeypatch, made.answer)
    return made


def bench(name: str) -> Setup:
    return Setup(model="m", load=Load(spec="rounds", seed=0, hash=name), vllm="0.32.0", core="kvtune")


def worker(own: Setup, path: Path, url: str, *, trials: int = 20, join: bool = False) -> list[Trial]:
    with StudyJournal(path, "tune", own) as journal:
        settings = SearchSettings(trials=trials, seed=3, storage=url, join=join)
        return search(own, SPACE, BY, journal, settings, lambda t: None)


@pytest.mark.full
def test_two_workers_share_one_study(cluster: Cluster, simulator: Simulator, tmp_path: Path) -> None:
    shared = bench("shared")
    first = worker(shared, tmp_path / "a.jsonl", cluster.url, trials=4)
    assert len(first) == 2 + 4
    with ThreadPoolExecutor(2) as pool:
        began, joined = (
            pool.submit(worker, shared, tmp_path / f"{name}.jsonl", cluster.url, trials=30, join=name == "c")
            for name in ("b", "c")
        )
        both = [began.result(), joined.result()]
    sizes = [simulator.asked[f"{name}.jsonl"] for name in "bc"]
    assert min(sizes) > 3, f"both worked: {sizes}"
    for name, by_worker in zip("bc", both, strict=True):
        with StudyJournal(tmp_path / f"{name}.jsonl", "tune", shared) as journal:
            assert {t.key for t in journal.trials} == {t.key for t in by_worker}, (
                "the page shows the others' trials, too"
            )
            assert len({t.number for t in journal.trials}) == len(journal.trials)
    for trials in both:  # at its end each worker has its own trials and the other's
        assert len({(t.role, shown(t.settings)) for t in trials}) == len(trials)
        assert len(trials) >= 25


def test_a_joiner_needs_a_study(cluster: Cluster, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no study") as refused:
        worker(bench("nobody-began-it"), tmp_path / "a.jsonl", cluster.url, join=True)
    assert "hush" not in refused.value.message


def test_another_bench_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    worker(bench("one"), tmp_path / "a.jsonl", cluster.url, trials=2)
    other = msgspec.structs.replace(bench("one"), engine_args=["--block-size", "64"])
    with pytest.raises(UsageError, match="another bench"):
        worker(other, tmp_path / "b.jsonl", cluster.url, trials=2)


@pytest.mark.full
def test_a_server_that_goes_away_and_comes_back(
    cluster: Cluster, simulator: Simulator, tmp_path: Path
) -> None:
    outage_bench = bench("outage")

    def stop() -> None:
        if simulator.asked.total() == 2 + 7:
            cluster.stop()

    simulator.on_submit = stop
    with pytest.raises(KvtuneError, match="does not answer") as gone:
        worker(outage_bench, tmp_path / "a.jsonl", cluster.url, trials=12)
    assert "hush" not in gone.value.message
    assert "storage is back" in gone.value.hint
    with pytest.raises(KvtuneError, match="does not answer"):
        worker(outage_bench, tmp_path / "b.jsonl", cluster.url, trials=12)
    cluster.start()
    trials = worker(outage_bench, tmp_path / "c.jsonl", cluster.url, trials=12)
    assert simulator.asked["c.jsonl"] <= 2 + 12 - 6, "the six trials reported before are kept"
    assert len(trials) >= 12


def test_one_seed_is_one_study(tmp_path: Path) -> None:
    runs = [worker(bench("s"), tmp_path / f"{i}.jsonl", "", trials=30) for i in range(2)]
    assert [t.settings for t in runs[0]] == [t.settings for t in runs[1]]


@pytest.mark.parametrize(
    "stored", ["{", 3, '{"number":-1e400}', '{"summary":{"x":' + "9" * 4000 + "}}", "[" * 99_999]
)
def test_a_trial_that_is_none_is_refused_in_one_line(stored: object) -> None:
    storage = OptunaStudy(bench("s"), BY, 0)
    storage._study.ask().set_user_attr(TRIAL, stored)
    with pytest.raises(UsageError, match="holds what is no Trial: ") as refused:
        storage.trials()
    assert len(refused.value.message) < 400


def test_a_missing_driver_says_so(tmp_path: Path) -> None:
    with pytest.raises(KvtuneError) as refused:
        worker(bench("s"), tmp_path / "a.jsonl", "postgresql+nodriver://x@127.0.0.1/x")
    assert "nodriver" in refused.value.message


def test_two_objectives_are_searched_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def trading(trials: Trials, plan: PlannedTrial) -> Answer:
        """More slack: more hits, and a longer wait."""
        slack, windows = (int(plan.settings.get(name, 0)) for name in ("slack", "windows"))
        figures = {"prefix_cache": {"hit_rate": slack / 40}, "ttft_ms": {"mean": 10.0 + slack + windows}}
        return Answer({"core": {"active": True}, **figures})

    answered(monkeypatch, trading)
    two, by = bench("two"), objective("hit-rate,ttft")
    with StudyJournal(tmp_path / "a.jsonl", "tune", two) as journal:
        searched = search(two, SPACE, by, journal, SearchSettings(trials=30, seed=1), lambda t: None)
    ahead = front([t for t in searched if t.role == "trial"], axes(by))
    assert len(ahead) > 2, "hits are bought with waiting: several settings are worth having"
    with StudyJournal(tmp_path / "b.jsonl", "tune", two) as journal:
        again = search(two, SPACE, by, journal, SearchSettings(trials=30, seed=1), lambda t: None)
    assert [t.settings for t in again] == [t.settings for t in searched]
