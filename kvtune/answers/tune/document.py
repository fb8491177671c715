"""What a study (sweep or tune) says: result, advice, finalists, trials, charts, recipe."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import PurePath

from kvtune.answers.invocation import of_setup
from kvtune.answers.tune.charts import effects_section, front_section, maps_section
from kvtune.answers.tune.result import EngineRuns, StudyView, Trial, study_identity
from kvtune.answers.tune.rows import (
    best_first,
    common,
    figure_of,
    folded_rows,
    named,
    phrase_of,
    quantity_of,
    settings_text,
    shown_as,
    terse,
    whole,
)
from kvtune.answers.tune.tiers import tier_section
from kvtune.base.commands import VERIFY, command, exported_serve, model_word, recipe_commands
from kvtune.base.units import count, span
from kvtune.data.knobs import CORE, TIER_SIZE, knob_of
from kvtune.data.layout.models import SHAPES
from kvtune.data.recipe import text_of
from kvtune.data.run.types import NOMINAL
from kvtune.data.show.parts import Banner, Cell, Document, Section, Tile, cell, grid_of
from kvtune.lab.device.settings import Timed
from kvtune.reading.analysis.again import left_out, load_words, with_flags

SHOWN = 40
"""The most rows of trials with equal results that are shown."""


def document(study: StudyView) -> Document:
    kind, setup = study.result.kind, study.setup
    sections = tuple(section for section in study_sections(study) if section is not None)
    return Document(
        name=f"kvtune {kind}",
        subject=setup.model,
        headline=" ".join((words(study)[0], *(s.lead for s in sections if s.id == "tiers"))),
        sections=sections,
        identity=study_identity(kind, setup),
        title=f"{setup.model} · {kind} · kvtune",
        banners=tuple(banners(study)),
    )


def study_sections(study: StudyView) -> Iterator[Section | None]:
    objective, place = study.result.objective, study.drawn_on
    done = [
        t
        for t in study.result.trials
        if t.state == "complete" and t.on == place and figure_of(t, objective) is not None
    ]
    knobs = list(dict.fromkeys([*(effect.knob for effect in study.effects), *_varied(done)]))
    yield _outcome(study, objective)
    yield tier_section(study)
    yield maps_section(done, knobs, objective, study.result.best)
    yield _finalists(study, objective)
    yield _trials(study, objective)
    yield effects_section(study.effects, objective, place, _varied(done))
    yield front_section(done, study.front, study.axes)
    yield _use(study)
    yield _every(study, objective)


def _varied(trials: Sequence[Trial]) -> list[str]:
    """Return the knobs that have more than one value in these trials."""
    return [k for k in named(trials) if len({t.settings[k] for t in trials if k in t.settings}) > 1]


def _timed(trial: Trial) -> bool:
    return bool((trial.summary.get("ttft_ms") or {}).get("mean"))


def banners(study: StudyView) -> Iterator[Banner]:
    trials = study.result.trials
    places = {t.on for t in trials}
    if places == {"sim"}:
        times = "times are predictions" if any(map(_timed, trials)) else f"there are no times ({NOMINAL})"
        yield Banner("info", "Simulated.", f"No engine ran: hits are those of replays, {times}.")
    elif "sim" in places:
        words = "Trials marked sim ran without an engine: their times are predictions."
        yield Banner("info", "Partly simulated.", words)
    if failed := sum(t.state == "failed" for t in trials):
        every, some = failed == len(trials), f"{count(failed)} trial{'s' if failed > 1 else ''} failed."
        title = "Every trial failed." if every else some
        yield Banner("bad" if every else "warn", title, "The table of trials says why.")


def _all_trials(study: StudyView) -> list[Trial]:
    """Return the trials in their order, the baseline among them."""
    trials, baseline = list(study.result.trials), study.result.baseline
    if baseline is not None and all(trial.number != baseline.number for trial in trials):
        trials.insert(0, baseline)
    return trials


def _outcome(study: StudyView, objective: str) -> Section:
    best, stock, verdict, setup = study.result.best, study.result.baseline, study.result.verdict, study.setup
    tiles = []
    title = shown_as(objective).title
    if best is not None:
        tiles.append(Tile(f"Best {title}", quantity_of(best, objective), settings_text(best)))
    if stock is not None:
        tiles.append(Tile(f"Baseline {title}", quantity_of(stock, objective), settings_text(stock)))
    states = [trial.state for trial in _all_trials(study)]
    rest = len(states) - states.count("complete")
    tiles.append(Tile("Trials", count(len(states)), f"{count(rest)} of them not complete" if rest else ""))
    ahead = "Ahead in simulation" if verdict.on == "sim" else "A winner"
    _, advice, command = words(study)
    asked = (("load", setup.load.spec), ("vLLM", setup.vllm), ("flags", shlex.join(setup.engine_args)))
    without = left_out(setup.engine_args)
    return Section(
        "outcome",
        ahead if verdict.winner else "No winner",
        advice,
        tiles=tuple(tiles),
        facts=tuple(fact for fact in asked if fact[1]),
        notes=(
            *(f"{_capitalized(note)}." for note in study.result.notes),
            *([without] if without else []),
        ),
        commands=(command,),
    )


def words(study: StudyView) -> tuple[str, str, str]:
    """Return the result, the advice, and the command that carries out the advice."""
    objective = study.result.objective
    best, stock, verdict, setup = study.result.best, study.result.baseline, study.result.verdict, study.setup
    if best is None:
        return (
            "No trial was completed, so these settings cannot be judged.",
            "The table of trials has the reasons; check this model's settings with the command below.",
            with_flags(["doctor", model_word(setup.model)], setup.engine_args),
        )
    simulated = verdict.on == "sim"
    where = "in simulation" if simulated else "on the engine"
    if stock is None or figure_of(stock, objective) is None:
        result = f"The best of these settings ({settings_text(best)}) reached {phrase_of(best, objective)}."
        result += " There is no baseline to compare it with."
    elif verdict.winner:
        against = f"{quantity_of(stock, objective)} with stock vLLM"
        result = f"{settings_text(best)}: {phrase_of(best, objective)}, against {against}, {where}."
    else:
        result = (
            f"Nothing tried here was shown to be better than stock vLLM: {phrase_of(best, objective)} at best, "
            f"{quantity_of(stock, objective)} with stock, {where}."
        )
    if study.tied > 1:
        tried = sum(t.on == "sim" and t.role == "trial" for t in study.result.trials)
        which = ": this one changes the fewest defaults" if verdict.winner else ""
        result += f" {study.tied} of {tried} settings tie{which}."
    if study.why:
        result += f" {_capitalized(study.why)}."
    if study.result.recipe and isinstance(setup.device, Timed):
        advice = "Verify the recipe below: it is for the simulated device, and no server runs on that."
        return result, advice, command("recipe", "verify", PurePath(study.result.recipe).name)
    if study.result.recipe:
        return result, "Serve the model with the recipe below.", _serve(study, study.result.recipe)
    if not verdict.winner and study.result.kind == "tune":
        advice = "Keep stock's settings for this workload; what any cache of each size could hit shows what is left."
        load = load_words(setup.load.spec, setup.load.seed, needed=True)
        return result, advice, command("bounds", *load, "--model", model_word(setup.model))
    if not verdict.winner:
        owner = "of vLLM's flags " if setup.core == "stock" else ""
        advice = f"Keep stock's settings for this workload, or search over all knobs {owner}first."
        return result, advice, _tune(study)
    if simulated:
        advice = "Confirm it on the real engine: this repeats stock and the best settings in turn, and writes a recipe."
        return result, advice, _tune(study)
    if not verdict.confirmed:
        advice = "Repeat it: each setting ran once, so the difference may be chance."
        return result, advice, _tune(study)
    return result, "Run the workload with the best settings and look at the page.", _profile(study, best)


def _finalists(study: StudyView, objective: str) -> Section | None:
    if not study.engine_runs:
        return None
    rows = (_engine_row(runs, objective) for runs in study.engine_runs)
    why = ["Whole runs on the real engine, in turns, every second round in reverse; the last run is stock's."]
    if study.drift_ttft is not None:
        drift = f"{100 * study.drift_ttft:+.1f} %"
        why.append(f"Stock's first-token time drifted by {drift} from its first run to its last.")
    tables = (grid_of(rows, "Finalists on the engine"),)
    return Section("finalists", "Finalists", tables=tables, notes=tuple(why))


def _engine_row(runs: EngineRuns, objective: str) -> dict[str, object]:
    values, figure, unit = runs.values, runs.figure, shown_as(objective)
    interval, word = Cell("–"), runs.why
    if figure is not None and figure.low is not None and figure.high is not None:
        interval, word = (
            Cell(span(unit.text(figure.low, signed=True), unit.text(figure.high, signed=True)), figure.low),
            figure.verdict,
        )
    ends = (unit.number(min(values)), unit.number(max(values))) if values else ("–", "–")
    relative = figure.relative if figure is not None else None
    return {
        "setting": settings_text(runs),
        "runs": Cell(str(len(values)), len(values)),
        f"mean {unit.head_with_unit}": cell(runs.mean, unit.number),
        "range": Cell(span(*ends), min(values, default=None)),
        "against stock, 95 %": interval,
        "relative": cell(relative, lambda change: f"{100 * change:+.1f} %"),
        "verdict": Cell(word, css=word if word in ("better", "worse") else "quiet"),
    }


def _use(study: StudyView) -> Section | None:
    """Make the section that says how to use the recipe or, without a recipe, how to run the best setting."""
    best, recipe = study.result.best, study.result.recipe
    if best is None:
        return None
    if not recipe:
        lead = "No recipe was written: `kvtune tune` writes one once a gain is confirmed on the engine."
        again = ("Run the best setting of these and look at its page", _profile(study, best))
        return Section("recipe", "How to use it", lead, commands=(again,))
    name, model = PurePath(recipe).name, study.setup.model
    load = load_words(study.setup.load.spec, study.setup.load.seed)
    commands = list(recipe_commands(model, name, load).items())
    if isinstance(study.setup.device, Timed):  # no server runs on a simulated device
        commands = [(what, line) for what, line in commands if what == VERIFY]
    else:
        commands.append(("and then", exported_serve(study.setup.core, shape=model in SHAPES)))
        commands.append(("Compare answers of its hits", command("check", "http://127.0.0.1:8000")))
    lead = f"{name}, written by this study. It holds settings and their evidence; nothing in it is executed."
    folded = {"The whole recipe": study.recipe_text} if study.recipe_text else {}
    return Section("recipe", "The recipe", lead, commands=tuple(commands), folded=folded)


def _trials(study: StudyView, objective: str) -> Section | None:
    """Make the table of what came out, the best first. Trials of equal results stand in one row."""
    trials = _all_trials(study)
    rows = folded_rows(best_first(trials, objective, study.result.best))
    kept = rows[:SHOWN] + [row for row in rows[SHOWN:] if row.first.role == "baseline"]
    lead = "The best first; trials of equal results stand in one row."
    if any(trial.on == "sim" and _timed(trial) for trial in trials):
        lead += " Times of simulated trials are predictions."
    notes = [f"{len(rows) - len(kept)} more rows: --json lists all trials."] if len(rows) > len(kept) else []
    if shared := common(trials):
        notes.append(f"every trial: {shared}")
    if any(trial.role == "baseline" for trial in trials):
        notes.append("baseline: stock vLLM, without any of these settings")
    facts = tuple((knob.head, knob.help) for knob in map(knob_of, named(trials)))
    tables = (terse(kept, objective),) if kept else ()
    return (
        Section("results", "Results", lead, tables=tables, notes=tuple(notes), facts=facts)
        if trials
        else None
    )


def _every(study: StudyView, objective: str) -> Section:
    best, trials = study.result.best, _all_trials(study)
    lead = "Every trial with every figure, in the order they ran." if trials else "There are none."
    table = whole(trials, objective, best.number if best is not None else None)
    return Section("trials", "Trials", lead, tables=(table,), page_only=True)


def _capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]


def _tune(study: StudyView) -> str:
    setup = study.setup
    flags = list(setup.engine_args)
    tier = study.result.best.settings.get(TIER_SIZE) if study.result.best else None
    if tier and not any("kv-offloading-size" in word.replace("_", "-") for word in flags):
        # `tune` adds a tier only if a flag asks for it.
        flags += ["--kv-offloading-size", text_of(tier)]
    return replace(of_setup(study.setup, study.result.objectives), flags=flags).line("tune")


def _serve(study: StudyView, recipe: str) -> str:
    """Return the command that serves the recipe; of stock vLLM, one that needs no kvtune where that can serve it."""
    device = study.result.best.summary.get("engine", {}).get("device", "") if study.result.best else ""
    plain = replace(of_setup(study.setup), flags=study.best_flags).serve(device)
    if study.setup.core == "stock" and plain.startswith("vllm "):
        return plain
    return command("serve", model_word(study.setup.model), "--recipe", PurePath(recipe).name)


def _profile(study: StudyView, best: Trial) -> str:
    core = {**study.setup.core_settings, **{n: v for n, v in best.settings.items() if n in CORE}}
    invocation = replace(of_setup(study.setup), core=best.core, core_settings=core, flags=study.best_flags)
    return invocation.line("profile")
