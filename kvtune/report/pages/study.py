"""The page of a sweep or a search: what came out and what to do, finalists, recipe, drawings, every trial in a table.

In: a study as plain data (`kvtune.tune.study.told`), never the tuner itself. Drawn by the frame of every other page.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from kvtune.report.banners import Banner
from kvtune.report.charts import Cell, Section, grid
from kvtune.report.pages.study_charts import (
    FIGURES,
    Trial,
    effects_section,
    figure_of,
    front_section,
    maps_section,
    quantity,
    said,
    settings_text,
    shown,
    text_of,
)
from kvtune.report.sections.verdict import Tile
from kvtune.units import count


def sweep_page(found: Mapping[str, Any]) -> str:
    """One self-contained HTML file."""
    from kvtune.report.pages.frame import render

    bench = found["bench"]
    return render(
        title=f"{bench['model']} · {found['kind']} · kvtune",
        eyebrow=f"kvtune {found['kind']}",
        heading=bench["model"],
        subtitle=", ".join(
            part
            for part in (bench["spec"], f"vLLM {bench['vllm']}" if bench["vllm"] else "", _args(bench))
            if part
        ),
        sections=sweep_sections(found),
        banners=_banners(found),
    )


def sweep_sections(found: Mapping[str, Any]) -> list[Section]:
    by, place = str(found["objective"]), found["drawn_on"]
    done = [
        t
        for t in found["trials"]
        if t["state"] == "complete" and t["on"] == place and figure_of(t, by) is not None
    ]
    knobs = [name for name, _ in found["effects"]]
    sections = [
        _outcome(found, by),
        _finalists(found, by),
        _use(found),
        maps_section(done, knobs, by),
        effects_section(found["effects"], by, found["kind"]),
        front_section(done, found["front"], found["axes"]),
        _table(found, by),
    ]
    return [s for s in sections if s is not None]


def _banners(found: Mapping[str, Any]) -> list[Banner]:
    places = {t["on"] for t in found["trials"]}
    told = []
    if places == {"sim"}:
        told.append(
            Banner("info", "Simulated.", "No engine ran: hits are the engine's own, times are predicted.")
        )
    elif "sim" in places:
        told.append(Banner("info", "Partly simulated.", "Trials marked sim ran no engine: times predicted."))
    failed = sum(t["state"] == "failed" for t in found["trials"])
    if failed and failed == len(found["trials"]):
        told.append(Banner("bad", "Every trial failed.", "The table of trials says why."))
    elif failed:
        told.append(
            Banner(
                "warn",
                f"{count(failed)} trial{'s' if failed > 1 else ''} failed.",
                "The table of trials says why.",
            )
        )
    return told


def _outcome(found: Mapping[str, Any], by: str) -> Section:
    best, stock, verdict = found["best"], found["baseline"], found["verdict"]
    figures = []
    title = FIGURES[by][1].partition(" (")[0]
    if best is not None:
        figures.append(Tile(f"Best {title}", quantity(best, by), settings_text(best)))
    if stock is not None and stock is not best:
        figures.append(Tile(f"Baseline {title}", quantity(stock, by), settings_text(stock)))
    states = [t["state"] for t in found["trials"]]
    rest = len(states) - states.count("complete")
    figures.append(Tile("Trials", count(len(states)), f"{count(rest)} of them not complete" if rest else ""))
    ahead = "Ahead in simulation" if verdict["on"] == "sim" else "A winner"
    heading = ahead if verdict["winner"] else "No winner"
    result, advice, command = _words(found, by)
    values = {
        "lines": (
            ("What came out", result),
            ("What to do", advice),
            *(("Noticed", f"{note[:1].upper()}{note[1:]}.") for note in found["notes"]),
        ),
        "command": command,
        "figures": figures,
        "winner": bool(verdict["winner"]),
    }
    return Section("outcome", heading, "", "sweep.html", values)


def _words(found: Mapping[str, Any], by: str) -> tuple[str, str, str]:
    """What came out, what to do, and the command for it."""
    best, stock, verdict, bench = found["best"], found["baseline"], found["verdict"], found["bench"]
    if best is None:
        return (
            "No trial was completed, so nothing can be said about these settings.",
            "Look at the reason in the table of trials, and see what this model's settings come to.",
            _command("doctor", bench["model"], *_dashed(bench)),
        )
    simulated = verdict["on"] == "sim"
    where = "in simulation" if simulated else "on the engine"
    if stock is None or figure_of(stock, by) is None:
        result = f"The best of these settings ({settings_text(best)}) reached {said(best, by)}."
        result += " There is no baseline to compare it with."
    elif verdict["winner"]:
        result = f"{settings_text(best)}: {said(best, by)}, against {quantity(stock, by)} with stock vLLM, {where}."
    else:
        result = (
            f"Nothing tried here was shown to be better than stock vLLM: {said(best, by)} at best, "
            f"{quantity(stock, by)} with stock, {where}."
        )
    if verdict.get("why"):
        result += f" {str(verdict['why'])[:1].upper()}{str(verdict['why'])[1:]}."
    if found["recipe"]:
        return result, "Serve the model with the recipe below.", _serve(found)
    if not verdict["winner"]:
        advice = "Keep stock's settings for this load, or search over all knobs before giving up."
        return result, advice, _tune(bench, by)
    if simulated:
        advice = "Prove it on the real engine: this searches, repeats stock and the best in turn, and writes a recipe."
        return result, advice, _tune(bench, by)
    if not verdict["confirmed"]:
        advice = "Repeat it: each setting ran once, so the difference may be chance."
        return result, advice, _tune(bench, by)
    return result, "Run the load with the best settings and look at its page.", _profile(found)


def _finalists(found: Mapping[str, Any], by: str) -> Section | None:
    if not found["finalists"]:
        return None
    _, title, scale = FIGURES[by]
    rows = []
    for side in found["finalists"]:
        mean, low, high, relative = (side.get(name) for name in ("mean", "low", "high", "relative"))
        values = [scale * value for value in side["values"]]
        between = (
            f"{scale * low:+,.4g} to {scale * high:+,.4g}" if low is not None and high is not None else "–"
        )
        word = str(side.get("verdict", "")) if between != "–" else str(side.get("why", ""))
        rows.append(
            (
                settings_text(side),
                Cell(str(len(values)), len(values)),
                Cell(f"{scale * mean:,.4g}", scale * mean) if mean is not None else "–",
                Cell(f"{min(values):,.4g} to {max(values):,.4g}", min(values)) if values else "–",
                Cell(between, scale * low) if low is not None else between,
                Cell(f"{100 * relative:+.1f} %", relative) if relative is not None else "–",
                Cell(word, css=word if word in ("better", "worse") else "quiet"),
            )
        )
    heads = ("setting", "runs", f"mean {title}", "from to", "against stock, 95 %", "relative", "verdict")
    drift = found["verdict"].get("drift_ttft")
    why = [
        "Whole runs on the real engine, in turn: stock, each finalist, and again; stock once more at the end."
    ]
    if drift is not None:
        why.append(
            f"Stock's first-token time drifted by {100 * drift:+.1f} % from its first run to its last."
        )
    values_of = {"tables": [grid(heads, rows, "Finalists on the engine")], "why": why}
    return Section("finalists", "Finalists", "", "figures.html", values_of)


def _use(found: Mapping[str, Any]) -> Section | None:
    """The recipe and how to use it; without one, how to run the best setting."""
    if found["best"] is None:
        return None
    if not found["recipe"]:
        commands = [("Run the best setting of these and look at its page", _profile(found))]
        lead = "No recipe was written: `kvtune tune` writes one when a gain was shown on the engine."
        values = {"text": "", "commands": commands}
        return Section("recipe", "How to use it", lead, "recipe.html", values)
    name, model = PurePath(found["recipe"]).name, found["bench"]["model"]
    commands = [
        ("Serve with it", _serve(found)),
        ("Run its evidence again: does it hold here?", _command("recipe", "verify", name)),
        ("For plain vLLM: a configuration and its environment", _command("recipe", "export", name, "-o", "served")),
        ("and then", f"source served/env.sh && vllm serve {shlex.quote(model)} --config served/config.yaml"),
    ]  # fmt: skip
    lead = f"{name}, written by this study. It holds settings and their evidence, nothing that is executed."
    return Section(
        "recipe", "The recipe", lead, "recipe.html", {"text": found["recipe_text"], "commands": commands}
    )


def _table(found: Mapping[str, Any], by: str) -> Section:
    trials: list[Trial] = list(found["trials"])
    if found["baseline"] is not None and all(t["number"] != found["baseline"]["number"] for t in trials):
        trials.insert(0, found["baseline"])
    knobs = list(dict.fromkeys(name for t in trials for name in t["settings"]))
    best = found["best"]["number"] if found["best"] is not None else None
    told = [
        name for name in FIGURES if name != "goodput" or any(figure_of(t, name) is not None for t in trials)
    ]
    rows = [_trial_row(t, told, knobs, "best" if t["number"] == best else "") for t in trials]
    heads = ("trial", "on", *(FIGURES[name][1] for name in told), *knobs, "state")
    example = next(
        (
            f"{knob}={cell.text}"
            for row in rows
            for knob, cell in zip(knobs, row[2 + len(told) :], strict=False)
            if cell.text
        ),
        "",
    )
    lead = (
        "All of them, as they ran. Times of simulated trials are predictions." if trials else "None was made."
    )
    return Section(
        "trials",
        "Trials",
        lead,
        "trials.html",
        {"table": grid(heads, rows, "All trials"), "example": example or "complete"},
    )


def _trial_row(t: Trial, told: Sequence[str], knobs: Sequence[str], css: str) -> tuple[Cell, ...]:
    name = "stock" if t["role"] == "baseline" else f"{t['number']} (best)" if css else str(t["number"])
    own = []
    for knob in knobs:
        value = t["settings"].get(knob)
        number = float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
        own.append(Cell("" if value is None else shown(value), number))
    complete = t["state"] != "failed"
    figures = [Cell(text_of(t, by), figure_of(t, by)) if complete else Cell("–") for by in told]
    return Cell(name, float(t["number"]), css), Cell(t["on"]), *figures, *own, Cell(t["why"] or t["state"])


def _args(bench: Mapping[str, Any]) -> str:
    return shlex.join(bench["engine_args"])


def _dashed(bench: Mapping[str, Any]) -> tuple[str, ...]:
    return ("--", *bench["engine_args"]) if bench["engine_args"] else ()


def _tune(bench: Mapping[str, Any], by: str) -> str:
    return _command("tune", bench["model"], "-w", bench["spec"], "--objective", by, *_dashed(bench))


def _serve(found: Mapping[str, Any]) -> str:
    return _command("serve", found["bench"]["model"], "--recipe", PurePath(found["recipe"]).name)


def _profile(found: Mapping[str, Any]) -> str:
    from kvtune.core.settings import KNOBS

    bench, best, args = found["bench"], found["best"], found["best_flags"]
    core = {**bench["core_settings"], **{n: v for n, v in best["settings"].items() if n in KNOBS}}
    words = ["profile", bench["model"], "-w", bench["spec"], "--core", str(best["core"])]
    for name, value in core.items():
        words += ["--set", f"core.{name}={shown(value)}"]
    return _command(*words, *(("--", *args) if args else ()))


def _command(*words: str) -> str:
    return shlex.join(("kvtune", *words))
