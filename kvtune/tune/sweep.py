"""A sweep: settings in, trials out, each journalled as it ends. Simulated two at once, on the engine one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from kvtune.errors import KvtuneError
from kvtune.files import explained, replacing
from kvtune.sim.cost import NOMINAL, StepCost
from kvtune.tune.effects import notes
from kvtune.tune.objective import Objective, axes, best, front
from kvtune.tune.space.values import Settings
from kvtune.tune.trials.engine import engine_trial
from kvtune.tune.trials.journal import StudyJournal
from kvtune.tune.trials.simulated import Answer, SimPool
from kvtune.tune.trials.trial import Bench, Place, Role, Trial, refused
from kvtune.workload.types import Workload

SCHEMA = 1
On = Literal["sim", "engine", "both"]


@dataclass(frozen=True, slots=True)
class Wanted:
    """A trial that is to be made."""

    settings: Settings
    role: Role = "trial"
    stock: bool = False

    def key(self, on: Place, bench: Bench) -> str:
        core = "stock" if self.stock else bench.core
        return Trial(number=0, settings=self.settings, on=on, core=core, role=self.role).key


def wanted(bench: Bench, chosen: Sequence[Settings]) -> list[Wanted]:
    """The trials of a sweep: stock vLLM as the baseline, then the chosen settings. One setting is its own baseline."""
    own = [Wanted(settings, stock=bench.core == "stock") for settings in chosen]
    return own if len(own) == 1 and not own[0].settings else [Wanted({}, "baseline", stock=True), *own]


def run_sim(
    bench: Bench,
    asked: Sequence[Wanted],
    journal: StudyJournal,
    say: Callable[[Trial], None],
    cost: StepCost = NOMINAL,
) -> None:
    """Simulate what the journal does not hold yet."""
    held = {t.key for t in journal.trials}
    todo = [w for w in asked if w.key("sim", bench) not in held]
    if not todo:
        return
    number = 1 + max((t.number for t in journal.trials), default=-1)
    waiting = list(enumerate(todo, start=number))
    asked_by = dict(waiting)
    with SimPool(bench, cost) as pool:
        while waiting or pool.running:
            while waiting and pool.free:
                n, w = waiting.pop(0)
                pool.submit(n, w.settings, stock=w.stock)
            n, answer = pool.next_done()
            trial = sim_trial(bench, n, asked_by[n], answer)
            journal.add(trial)
            say(trial)


def sim_trial(bench: Bench, number: int, asked: Wanted, answer: Answer) -> Trial:
    found = answer.summary
    core = found.get("core", {})
    why = answer.failed
    if not why and not asked.stock and bench.core == "kvtune" and not core.get("active"):
        why = f"the core did not run: {core.get('why', '')}"
    why = why or refused(found)
    return Trial(
        number=number,
        settings=asked.settings,
        on="sim",
        core="stock" if asked.stock else bench.core,
        role=asked.role,
        state="failed" if why else found.get("state", "complete"),
        why=why or found.get("why", ""),
        elapsed_s=answer.elapsed_s,
        seed=bench.seed,
        summary=found,
    )


def run_engine(
    bench: Bench,
    workload: Workload,
    asked: Sequence[Wanted],
    journal: StudyJournal,
    output: Path,
    say: Callable[[Trial], None],
    on_event: Callable[[Any], None] = lambda event: None,
) -> None:
    """Run on the real engine what the journal does not hold yet."""
    held = {t.key for t in journal.trials}
    number = max((t.number for t in journal.trials), default=-1)
    for w in asked:
        if w.key("engine", bench) in held:
            continue
        number += 1
        trial, _ = engine_trial(
            bench,
            workload,
            w.settings,
            number,
            stock=w.stock,
            role=w.role,
            output=output,
            on_event=on_event,
        )
        journal.add(trial)
        say(trial)


def result(trials: Sequence[Trial], by: Objective) -> dict[str, Any]:
    """The `--json` object. Best is judged on the engine where there are engine trials, else in simulation."""
    place: Place = "engine" if any(t.on == "engine" for t in trials) else "sim"
    own = sorted((t for t in trials if t.role == "trial"), key=lambda t: t.number)
    at_place = [t for t in trials if t.on == place]
    baseline = next((t for t in at_place if t.role == "baseline"), None)
    found = best([t for t in at_place if t.role == "trial"], by)
    if baseline is None and len(own) == 1:
        baseline = own[0]
    return {
        "schema": SCHEMA,
        "kind": "sweep",
        "objective": by.name,
        "objectives": list(by.names),
        "trials": [t.plain() for t in own],
        "best": found.plain() if found else None,
        "baseline": baseline.plain() if baseline else None,
        "finalists": [],
        "pareto": [t.number for t in front(at_place, axes(by))],
        "verdict": verdict(found, baseline, by, place),
        "recipe": None,
        "notes": notes(trials),
    }


def verdict(found: Trial | None, baseline: Trial | None, by: Objective, place: Place) -> dict[str, Any]:
    """`winner` is True only for a trial better than stock; one run each, so nothing is called confirmed."""
    told = {"winner": False, "confirmed": False, "objective": by.name, "on": place}
    if found is None:
        return {**told, "text": "no trial was completed"}
    figure = by.of(found.summary)
    if baseline is None or baseline.state != "complete" or (stock := by.of(baseline.summary)) is None:
        return {
            **told,
            "best": figure,
            "text": f"{by.name} {figure:.4g}; there is no baseline to compare with",
        }
    assert figure is not None
    where = (
        "in simulation, not confirmed on the engine"
        if place == "sim"
        else "one engine run each, not repeated"
    )
    winner = baseline.number != found.number and by.better * (figure - stock) > 0
    text = f"{by.name} {figure:.4g} against stock's {stock:.4g} ({where})"
    if not winner:
        text = f"no winner: {text}"
    return {**told, "winner": winner, "best": figure, "baseline": stock, "text": text}


def fail_if_none(trials: Sequence[Trial]) -> None:
    """A sweep in which every trial failed has failed, with the first one's cause."""
    own = [t for t in trials if t.role == "trial"]
    if own and all(t.state == "failed" for t in own):
        raise KvtuneError(
            f"every trial failed: {own[0].why}", "check the values, MODEL and the flags after `--`"
        )


RESULT = ".result.json"


def keep_result(found: dict[str, Any], journal: Path) -> Path:
    """The `--json` object beside the journal, whole or not at all: what pages are drawn from."""
    path = journal.with_suffix(RESULT)
    hint = f"free space and give the command again with --study {journal}: its trials are kept"
    with explained(path, hint), replacing(path) as part:
        part.write_bytes(msgspec.json.encode(found))
    return path


def encoded(found: dict[str, Any]) -> str:
    return msgspec.json.encode(found).decode()
