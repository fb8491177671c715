"""What `kvtune recipe show` says: what a recipe sets, its evidence, the commands that use it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from kvtune.base.commands import command, recipe_commands
from kvtune.data.knobs import CORE, knob_of
from kvtune.data.recipe import Recipe, Scalar, text_of
from kvtune.data.run.signature import identity
from kvtune.data.show.parts import Document, Section, grid_of
from kvtune.data.show.terminal import Column
from kvtune.reading.analysis.comparison.compare import Figure
from kvtune.reading.analysis.figures import OBJECTIVES, OF_RECIPES, quantity
from kvtune.reading.report.figures import figure_table

STATUS = {"confirmed": "confirmed on the engine", "simulated": "simulated: no engine has confirmed it"}


def document(recipe: Recipe, name: str, state: str, *, shipped: bool = False) -> Document:
    """`state`: whether the recipe fits this machine. `shipped`: it came with kvtune."""
    about = recipe.recipe
    return Document(
        name="kvtune recipe",
        subject=name,
        headline=f"{name}: {about.model} on {about.device or 'any device'}, {STATUS.get(about.status, about.status)}",
        sections=tuple(_sections(recipe, name, state, shipped)),
        identity=identity("recipe", name, about.created),
        title=f"{name} · recipe · kvtune",
    )


def _sections(recipe: Recipe, name: str, state: str, shipped: bool) -> Iterator[Section]:
    yield _settings(recipe, state)
    yield _evidence(recipe)
    if recipe.recipe.checksum and not shipped:
        lead = "All this as its maker says: the checksum finds damage, not forgery. To measure it yourself:"
        yield Section("maker", "Whose word it is", lead, commands=(command("recipe", "verify", name),))
    commands = recipe_commands(recipe.recipe.model, name, ("-w", "YOUR_LOAD"))
    yield Section("use", "How to use it", commands=tuple(commands.items()))


def _settings(recipe: Recipe, state: str) -> Section:
    about = recipe.recipe
    made = [about.created[:10], f"kvtune {about.kvtune}", f"vLLM {about.vllm}"]
    made += [f"states in {about.state_dtype}"] if about.state_dtype else []
    facts = [("note", about.note), ("made", ", ".join(filter(None, made))), ("here", state)]
    rows = [_setting("vLLM", name, value) for name, value in recipe.engine.items()]
    rows += [_setting("core", name, value) for name, value in recipe.core.items()]
    note = "" if recipe.core else "kvtune's core at its defaults"
    if about.core == "stock":
        note = "stock vLLM, without kvtune's core"
    return Section(
        "settings",
        "What it sets",
        facts=tuple(fact for fact in facts if fact[1]),
        tables=(grid_of(rows),),
        notes=(note,) if note else (),
    )


def _setting(owner: str, name: str, value: Scalar) -> dict[Column, str]:
    note = knob_of(name)
    unit = note.unit if isinstance(value, (int, float)) and not isinstance(value, bool) else ""
    default = " (default)" if name in CORE and value == CORE[name].default else ""
    return {
        Column("sets", right=False): name,
        Column("of", right=False, rank=1): owner,
        Column("to", right=False): f"{text_of(value)} {unit}".strip() + default,
        Column("what it is", right=False, folds=True, least=24): note.help,
    }


def _evidence(recipe: Recipe) -> Section:
    evidence = recipe.evidence
    if "workload" not in evidence:
        lead = "It names no load that it was measured with." if evidence else "It was written by hand."
        return Section("evidence", "No evidence", lead)
    facts = [("load", str(evidence.get("workload", ""))), ("flags", _flags(evidence.get("engine_args", [])))]
    figures = [_figure(path, evidence.get("figures", {})) for path in OF_RECIPES]
    shown = [figure for figure in figures if figure is not None]
    if shown:
        stocks, mine = (len(evidence.get(key, [])) for key in ("baseline_runs", "runs"))
        facts.append(("runs", f"{stocks} engine runs of stock vLLM, {mine} of the recipe, in turn"))
    elif "simulated" in evidence:
        figure = quantity(OBJECTIVES.get(str(evidence.get("objective", "")), ""))
        old, new = (figure.text(evidence.get(key)) for key in ("simulated_baseline", "simulated"))
        facts.append((f"{figure.title} in simulation", f"{old} with stock vLLM, {new} with the recipe"))
    return Section(
        "evidence",
        "Evidence, for this load alone",
        facts=tuple((name, value) for name, value in facts if value),
        tables=(figure_table("stock", "recipe", shown),),
        notes=("Another load, another model or another device needs its own: `kvtune tune`.",),
    )


def _flags(flags: list[Any]) -> str:
    return shlex.join(str(flag) for flag in flags)


def _figure(path: str, kept: Mapping[str, Mapping[str, Any]]) -> Figure | None:
    values = kept.get(path.replace(".", "_"))
    if values is None:
        return None
    names = ("baseline", "recipe", "difference", "relative", "low", "high")
    a, b, difference, relative, low, high = map(values.get, names)
    verdict = values.get("verdict", "no difference shown")
    return Figure(path, a, b, difference, relative, low, high, verdict)
