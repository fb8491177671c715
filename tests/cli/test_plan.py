"""Before long work its plan, and progress from the first second, off a terminal too."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from kvtune.answers.tune.objective import OBJECTIVES, objective
from kvtune.answers.tune.result import Trial
from kvtune.answers.tune.trials.journal import StudyJournal
from kvtune.answers.tune.tune import fewest_runs
from kvtune.base.errors import KvtuneError
from kvtune.cli.views.plan import announce_study, engine_plan, replay_plan
from kvtune.cli.views.progress import ProgressView
from kvtune.cli.views.trials import TrialsView
from kvtune.data.run.file import read_run, write_run
from kvtune.data.run.machine import this_host
from kvtune.data.run.types import Run
from kvtune.lab.device.settings import nominal
from kvtune.lab.engine.messages import Event
from kvtune.lab.setup.setup import Load, Setup
from kvtune.requests.loads.spec import DEFAULT_SPEC, build
from tests.cli.terminal import shown
from tests.simulator import run

GOLDEN = Path(__file__).parents[1] / "golden"
BENCH = Setup(model="tiny-gemma3", load=Load(spec="rounds", seed=0, hash="abc"), core="kvtune")


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise KvtuneError("no engine here")

    monkeypatch.setattr("kvtune.lab.engine.profile.EngineBench.run", refuse)


def remember(folder: Path, *, load: str) -> None:
    """A run of tiny-gemma3 on this machine that took 30 s, 20 of them the engine's start."""
    recorded = read_run(GOLDEN / "schema1-rounds.kvrun")
    workload = msgspec.structs.replace(recorded.header.workload, hash=load)
    header = msgspec.structs.replace(
        recorded.header, host=this_host(), workload=workload, startup_s=20.0, wall_s=10.0
    )
    write_run(Run(header, {}), folder / f"{load}.kvrun")


def test_profile_says_first_what_runs_and_how_long_it_takes_here(
    tmp_path: Path, no_engine: None, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["profile", "tiny-gemma3", "-o", str(tmp_path)]

    def first_line(*more: str) -> str:
        assert run([*argv, *more]) == 1
        return capsys.readouterr().err.splitlines()[0]

    what = "plan: 1 engine run of rounds (36 requests), 1 engine start; "
    assert first_line() == f"{what}how long is not known: nothing was measured here yet"
    remember(tmp_path, load="another")
    assert first_line() == f"{what}the start about 20 s, and the load, which was not measured here yet"
    remember(tmp_path, load=build(DEFAULT_SPEC).hash)
    assert first_line() == f"{what}about 30 s: a run of this load takes 30 s here"
    assert "4 engine runs of rounds (36 requests), 4 engine starts; about 2 min" in first_line(
        "--repeat", "4"
    )


def test_a_search_knows_how_long_replays_of_the_same_load_took(tmp_path: Path) -> None:
    assert replay_plan(BENCH, 9, 2, tmp_path).endswith(
        "9 replays without a model, 2 at a time, no engine start; how long is known after the first"
    )
    with StudyJournal(tmp_path / "a.jsonl", "sweep", BENCH) as journal:
        for number, elapsed_s in enumerate((8.0, 12.0)):
            journal.add(Trial(number=number, settings={"slack": number}, on="sim", elapsed_s=elapsed_s))
    assert replay_plan(BENCH, 9, 2, tmp_path).endswith("; about 45 s: a replay of this load takes 10 s here")
    other = Setup.of_file({**BENCH.filed(), "workload_hash": "xyz"})
    assert replay_plan(other, 9, 2, tmp_path).endswith("how long is known after the first")


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Lines of progress at once; the function waits for one."""
    printed = threading.Event()
    monkeypatch.setattr("kvtune.cli.views.progress.EVERY_S", 0.0)
    said = "kvtune.cli.views.progress.Ticker.said"
    monkeypatch.setattr(said, lambda ticker: printed.set())

    def wait() -> None:
        printed.clear()
        assert printed.wait(30)
        printed.clear()
        assert printed.wait(30)  # the one before was printed

    return wait


def test_a_pipe_is_told_what_goes_on_while_an_engine_starts_and_between_events(
    ticks: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    with ProgressView(36, "tiny-gemma3") as view:
        view.phase("starting")
        view(Event(kind="phase", name="starting"))
        ticks()
        lines = capsys.readouterr().err.splitlines()
        said = lines.index("tiny-gemma3: starting engine")  # a tick may come before it
        assert re.fullmatch(r"tiny-gemma3: starting engine, \d+ s", lines[said + 1])
        view(Event(kind="phase", name="measuring"))
        view(Event(kind="progress", finished=9, output_tokens=100, query_tokens=10, hit_tokens=5))
        ticks()
    assert "9/36 requests" in capsys.readouterr().err.splitlines()[-1]


def test_a_pipe_is_told_how_many_trials_are_done_while_none_ends(
    ticks: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    with TrialsView(9, OBJECTIVES["hit-rate"]) as view:
        ticks()
        assert capsys.readouterr().err.splitlines()[1].startswith("0 of 9 trials done, starting, ")
        view.phase("searching in simulation")
        view(Trial(number=0, settings={}, on="sim"))
        ticks()
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("1 of 9 trials done, searching in simulation, ") and last.endswith(" left")


def test_only_what_is_planned_is_counted_down(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A search: stock's run, three replays of 10 s, and engine runs of 100 s, of which nobody knows how many come."""
    now = [0.0]
    monkeypatch.setattr("kvtune.cli.views.trials.monotonic", lambda: now[0])
    view = TrialsView(3, OBJECTIVES["hit-rate"])
    said = []
    for number, (on, seconds) in enumerate([("engine", 100), *[("sim", 10)] * 3, *[("engine", 100)] * 3]):
        now[0] += seconds
        view(Trial(number=number, settings={}, on=on))  # type: ignore[arg-type]
        now[0] += 3
        said.append(view._done().split(", ", 1)[0] + " | " + view._done().partition("so far")[2])
        now[0] -= 3
    assert said == [
        "0 of 3 trials and 1 engine run done | ",
        "1 of 3 trials and 1 engine run done | , about 20 s left of the replays",
        "2 of 3 trials and 1 engine run done | , about 10 s left of the replays",
        "3 of 3 trials and 1 engine run done | ",
        "3 of 3 trials and 2 engine runs done | ",
        "3 of 3 trials and 3 engine runs done | ",
        "3 of 3 trials and 4 engine runs done | ",
    ]
    view = TrialsView(3, OBJECTIVES["hit-rate"])
    view.phase("searching in simulation")
    view(Trial(number=0, settings={}, on="sim"))
    view.phase("finalists on the engine")
    assert view._done().startswith("1 trials done, ") and "left" not in view._done()
    engines = TrialsView(3, OBJECTIVES["hit-rate"], "engine")
    now[0] += 100
    engines(Trial(number=0, settings={}, on="engine"))
    assert engines._done().startswith("1 of 3 trials done") and engines._done().endswith("about 3 min left")
    verifying = TrialsView(0, OBJECTIVES["hit-rate"])
    assert verifying._done().startswith("0 engine runs done")


def test_a_plan_says_the_fewest_and_the_most_runs(tmp_path: Path) -> None:
    workload = build("rounds")
    remember(tmp_path, load=workload.hash)
    plan = engine_plan("tiny-gemma3", workload, 13, tmp_path, fewest=4)
    assert plan.startswith(
        "4 to 13 engine runs of rounds (36 requests), 4 to 13 engine starts; about 2 min to 6 min: "
    )
    assert fewest_runs(objective("hit-rate"), 2, in_turn=True) == 4
    assert fewest_runs(objective("hit-rate"), 4, in_turn=False) == 10
    assert fewest_runs(objective("ttft"), 2, in_turn=True) == 7


@pytest.mark.vllm
def test_a_terminal_shows_the_plan_and_the_trials_as_they_end(tmp_path: Path) -> None:
    load = "rounds:prefixes=1,prefix=64,output=2,rounds=2"
    code, text = shown(
        *("sweep", "tiny-gemma3", "-w", load, "--set", "block_size=32,64", "-o", str(tmp_path)),
    )
    assert code == 0
    assert "plan: 3 replays without a model" in text
    assert "0 of 3 trials done, starting" in text
    assert "baseline" in text.split("journal")[0]


def test_a_search_on_a_simulated_device_estimates_from_runs_on_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workload = build("rounds")
    remember(tmp_path, load=workload.hash)
    bench = Setup.of_file({**BENCH.filed(), "workload_hash": workload.hash})
    announce_study(bench, workload, tmp_path, replays=0, runs=2)
    announce_study(msgspec.structs.replace(bench, device=nominal()), workload, tmp_path, replays=0, runs=2)
    engine, host = capsys.readouterr().err.splitlines()
    assert "a run of this load takes 30 s here" in engine
    assert "how long is not known" in host, "the real engine's time says nothing of a simulated device's"
