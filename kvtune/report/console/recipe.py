"""The output of `kvtune recipe show`: settings, evidence, commands. `--raw` prints the file instead."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from kvtune.analysis.comparison.compare import Figure
from kvtune.analysis.figures import OBJECTIVES, OF_RECIPES, quantity
from kvtune.commands import command, recipe_commands
from kvtune.knobs import CORE, knob_of
from kvtune.recipe import Recipe, Scalar, SessionsEvidence, sessions_of, text_of
from kvtune.report.figures import figure_table
from kvtune.terminal import Column, FittedTable, folded
from kvtune.units import count, percent


def recipe_lines(
    recipe: Recipe, name: str, state: str, width: int, *, shipped: bool = False
) -> Iterator[str]:
    """Yield lines of at most `width` columns, except commands. `state`: whether the recipe fits this machine.

    `shipped`: it came with kvtune.
    """
    for line in _head(recipe, name, state, shipped):
        yield from folded(line, width)
    yield ""
    yield from _settings(recipe, width)
    yield ""
    for line in _evidence(recipe, width):
        yield from folded(line, width)
    yield ""
    for what, line in recipe_commands(recipe.recipe.model, name, ("-w", "YOUR_LOAD")).items():
        yield from (what, f"  {line}")


def _head(recipe: Recipe, name: str, state: str, shipped: bool) -> Iterator[str]:
    about = recipe.recipe
    status = {"confirmed": "confirmed on the engine", "simulated": "simulated: no engine has confirmed it"}
    yield f"{name}: {about.model} on {about.device or 'any device'}, {status.get(about.status, about.status)}"
    if about.checksum and not shipped:
        yield "  all this as its maker says: the checksum finds damage, not forgery. To measure it yourself:"
        yield f"  `{command('recipe', 'verify', name)}`"
    if about.note:
        yield f"  {about.note}"
    made = [
        about.created[:10],
        f"kvtune {about.kvtune}",
        f"vLLM {about.vllm}",
        f"states in {about.state_dtype}" if about.state_dtype else "",
    ]
    yield f"  made {', '.join(part for part in made if part)}"
    if state:
        yield f"  here: {state}"


def _settings(recipe: Recipe, width: int) -> Iterator[str]:
    rows = [_setting("vLLM", name, value) for name, value in recipe.engine.items()]
    rows += [_setting("core", name, value) for name, value in recipe.core.items()]
    if rows:
        columns = (
            Column("sets", right=False),
            Column("of", right=False, rank=1),
            Column("to", right=False),
            Column("what it is", right=False, folds=True, least=24),
        )
        yield from FittedTable(columns, rows, gap=2).lines(width)
    if recipe.recipe.core == "stock":
        yield "stock vLLM, without kvtune's core"
    elif not recipe.core:
        yield "kvtune's core at its defaults"


def _setting(of: str, name: str, value: Scalar) -> tuple[str, ...]:
    note = knob_of(name)
    unit = note.unit if isinstance(value, (int, float)) and not isinstance(value, bool) else ""
    default = " (default)" if name in CORE and value == CORE[name].default else ""
    return name, of, f"{text_of(value)} {unit}".strip() + default, note.help


def _evidence(recipe: Recipe, width: int) -> Iterator[str]:
    evidence, held = recipe.evidence, sessions_of(recipe)
    if not evidence:
        yield "no evidence: written by hand"
        return
    if held is not None:
        yield from _sessions(held)
        if "workload" not in evidence:
            return
        yield ""
    yield "evidence, for this load alone"
    yield f"  load   {evidence.get('workload', '')}"
    if flags := shlex.join(str(flag) for flag in evidence.get("engine_args", [])):
        yield f"  flags  {flags}"
    figures = [_figure(path, evidence.get("figures", {})) for path in OF_RECIPES]
    shown = [figure for figure in figures if figure is not None]
    if shown:
        runs = len(evidence.get("baseline_runs", [])), len(evidence.get("runs", []))
        yield f"  {runs[0]} engine runs of stock vLLM, {runs[1]} of the recipe, in turn"
        yield from (
            f"  {line}" for line in figure_table("stock", "recipe", shown).fitted(gap=2).lines(width - 2)
        )
    elif "simulated" in evidence:
        path = OBJECTIVES.get(str(evidence.get("objective", "")), "")
        shown_as = quantity(path)
        stock, mine = (shown_as.text(evidence.get(key)) for key in ("simulated_baseline", "simulated"))
        yield f"  {shown_as.title} in simulation: {stock} with stock vLLM, {mine} with the recipe"
    yield "  Another load, another model or another device needs its own: `kvtune tune`."


def _sessions(held: SessionsEvidence) -> Iterator[str]:
    """Yield the load that the recipe holds for, and the replays that say so."""
    limits = ",".join(f"{name}={most:g}" for name, most in held.slo.items())
    within = f", and nine of ten requests are within {limits}" if limits else ""
    yield (
        f"holds for up to {held.up_to} sessions of this load at once: hits stay above {100 * held.keep:g} % of what an "
        f"infinite cache hits{within}"
    )
    yield f"  load   {held.workload}"
    if flags := shlex.join(held.engine_args):
        yield f"  flags  {flags}"
    on = (
        f"--like-device {held.like_device}"
        if held.like_device
        else "a run's engine"
        if held.like_run
        else "this device"
    )
    times = "not known" if held.cost_source in ("", "plausible") else held.cost_source
    tokens = count(held.pool_blocks * held.block_tokens)
    yield f"  engine {on}, a pool of {tokens} tokens, step times {times}"
    for number, one in sorted(held.replays.items(), key=lambda pair: int(pair[0])):
        shares = ", ".join(percent(share) for share in one.kept)
        yield f"  {number} sessions keep {shares} (exact replays, seeds {', '.join(map(str, one.seeds))})"
    if held.searched:
        yield f"  estimates over more seeds: {' to '.join(map(str, held.searched))} sessions"


def _figure(path: str, kept: Mapping[str, Mapping[str, Any]]) -> Figure | None:
    values = kept.get(path.replace(".", "_"))
    if values is None:
        return None
    return Figure(
        path=path,
        a=values.get("baseline"),
        b=values.get("recipe"),
        difference=values.get("difference"),
        relative=values.get("relative"),
        low=values.get("low"),
        high=values.get("high"),
        verdict=values.get("verdict", "no difference shown"),
    )
