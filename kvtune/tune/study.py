"""A study file read again, and told as plain data: trials, verdict, effects, the front, finalists, recipe.

In: a journal (of `sweep` or `tune`) at any moment of its life. Out: what the page and `--json` say. Writes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from kvtune.engine.flags import without_overridden
from kvtune.errors import KvtuneError, UsageError
from kvtune.tune.confirm import Contender, judge
from kvtune.tune.effects import effects
from kvtune.tune.objective import Objective, axes, front
from kvtune.tune.sweep import RESULT, result
from kvtune.tune.trials.journal import FORMAT, Head
from kvtune.tune.trials.trial import Bench, Place, Trial, flags_of

START = b'{"kvtune_journal"'


@dataclass(frozen=True, slots=True)
class Study:
    kind: str
    bench: Bench
    trials: tuple[Trial, ...]


def is_study(path: Path) -> bool:
    """By its first bytes."""
    try:
        with path.open("rb") as file:
            return file.read(len(START)) == START
    except OSError:
        return False


def read_study(path: Path) -> Study:
    """Without the lock: a study may be looked at while it runs. A torn last line is not there yet."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
        head = msgspec.json.decode(lines[0], type=Head) if lines else None
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(f"{path} is not a readable study: {error}", "name the .jsonl of a sweep") from error
    if head is None or head.kvtune_journal != FORMAT:
        raise UsageError(f"{path} is a study of another format", f"this kvtune reads format {FORMAT}")
    trials = []
    for number, line in enumerate(lines[1:], start=2):
        try:
            trials.append(msgspec.json.decode(line, type=Trial))
        except msgspec.DecodeError as error:
            raise UsageError(
                f"{path}, line {number}: not a trial: {error}", "remove the line, and report again"
            ) from error
    return Study(head.kind, head.bench, tuple(trials))


def saved_result(journal: Path, study: Study) -> dict[str, Any] | None:
    """What the study's own command came to, with the intervals it computed; None where trials came later."""
    try:
        found = msgspec.json.decode(journal.with_suffix(RESULT).read_bytes())
        known = {t["number"] for t in found["trials"]}
    except (OSError, msgspec.DecodeError, KeyError, TypeError):
        return None
    return found if known == {t.number for t in study.trials} else None


def recipe_of(journal: Path, saved: dict[str, Any] | None) -> Path | None:
    """The recipe that the study wrote: where it was written, or else beside the journal."""
    written = str((saved or {}).get("recipe") or "")
    places = (Path(written), journal.with_name(Path(written).name)) if written else ()
    return next((p for p in (*places, journal.with_suffix(".toml")) if p.is_file()), None)


def told(
    study: Study, by: Objective, recipe: Path | None = None, saved: dict[str, Any] | None = None
) -> dict[str, Any]:
    """What the study came to. `recipe` is the file that it wrote, where there is one; `saved` its stored result."""
    found = result(study.trials, by)
    drawn_on = _widest(study.trials)
    own = [t for t in study.trials if t.role == "trial" and t.on == drawn_on]
    if saved is not None and saved.get("objective") != by.name:
        saved = None
    sides, verdict = _finalists(study.trials, by, saved)
    text = ""
    if recipe is not None:
        try:
            text = recipe.read_text(encoding="utf-8")
        except OSError:
            recipe = None
    return {
        **found,
        "kind": study.kind,
        "drawn_on": drawn_on,
        "bench": msgspec.to_builtins(study.bench),
        "verdict": {**found["verdict"], **(verdict if study.kind == "tune" else {})},
        "best_flags": without_overridden(flags_of(study.bench, (found["best"] or {}).get("settings", {}))),
        "effects": [[e.knob, [list(mean) for mean in e.means]] for e in effects(own, by)],
        "front": [t.number for t in front(own, axes(by))],
        "axes": [o.name for o in axes(by)],
        "finalists": sides,
        "recipe": str(recipe) if recipe else None,
        "recipe_text": text,
    }


def _widest(trials: Sequence[Trial]) -> Place:
    """Where most trials were completed: a search simulates many and runs few, and drawings need many."""
    places = [t.on for t in trials if t.role == "trial" and t.state == "complete"]
    return "engine" if 2 * places.count("engine") > len(places) else "sim"


def _finalists(
    trials: Sequence[Trial], by: Objective, saved: dict[str, Any] | None
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Every setting that ran on the engine more than once, against stock there; and the verdict over them."""
    stock = Contender({}, "baseline")
    sides: dict[str, Contender] = {}
    for t in trials:
        if t.on != "engine" or t.state != "complete":
            continue
        side = stock if t.role == "baseline" else sides.setdefault(t.key, Contender(t.settings, "trial"))
        side.trials.append(t)
    several = [side for side in sides.values() if len(side.trials) > 1]
    if not several or not stock.trials:
        return [], {}
    _read_runs(stock)
    rows = [_row(stock, stock, by)]
    for side in several:
        _read_runs(side)
        rows.append(_row(side, stock, by))
    if not all(side.runs for side in (stock, *several)):
        if saved is not None and saved.get("finalists"):
            return _as_saved(rows, several, saved, by)
        why = "run files of the finalists are gone, so no interval can be given again"
        return rows, {"confirmed": False, "winner": False, "why": why}
    found = judge(stock, several, by)
    shown = found.winner is not None
    return rows, {"confirmed": shown, "winner": shown, "why": found.why, "drift_ttft": found.drift}


def _as_saved(
    rows: list[dict[str, Any]], several: Sequence[Contender], saved: dict[str, Any], by: Objective
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The intervals that were computed while the run files were there."""
    by_settings = {json.dumps(f["settings"], sort_keys=True): f["figures"] for f in saved["finalists"]}
    for row, side in zip(rows[1:], several, strict=True):
        figures = by_settings.get(json.dumps(side.settings, sort_keys=True), ())
        figure = next((f for f in figures if f["path"] == by.path), None)
        if figure is not None:
            row.update({name: figure[name] for name in FIGURE_FIELDS})
    verdict = saved["verdict"]
    shown = bool(verdict["winner"])
    return rows, {"confirmed": shown, "winner": shown, "why": "", "drift_ttft": verdict.get("drift_ttft")}


def _read_runs(side: Contender) -> None:
    from kvtune.run.file import read_run

    for trial in side.trials:
        try:
            side.runs.append(read_run(Path(trial.run_file)))
        except KvtuneError:
            continue  # its run file is gone: the trial's own figures are still told


def _row(side: Contender, stock: Contender, by: Objective) -> dict[str, Any]:
    from kvtune.analysis.comparison.repeats import compare_repeats

    values = [value for t in side.trials if (value := by.of(t.summary)) is not None]
    row = {
        "settings": side.settings,
        "core": side.trials[0].core,
        "values": values,
        "mean": sum(values) / len(values) if values else None,
    }
    if side is stock:
        return {**row, "why": "the baseline"}
    if not side.runs or not stock.runs:
        return {**row, "why": "its run files are gone"}
    figures = compare_repeats(stock.runs, side.runs).figures
    figure = next((f for f in figures if f.path == by.path), None)
    return row if figure is None else {**row, **{n: getattr(figure, n) for n in FIGURE_FIELDS}}


FIGURE_FIELDS = ("difference", "relative", "low", "high", "verdict", "why")
