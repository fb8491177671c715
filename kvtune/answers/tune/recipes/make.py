"""Makes a recipe with evidence from a confirmed winner, and the set-up to verify a recipe. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from kvtune import __version__
from kvtune.answers.tune.confirm import Confirmed, Contender
from kvtune.answers.tune.objective import Objective
from kvtune.answers.tune.result import Settings, Trial
from kvtune.answers.tune.trials.setup import core_part, engine_part
from kvtune.base.masking import without_secrets
from kvtune.data.flags import flag_value
from kvtune.data.knobs import ENGINE
from kvtune.data.recipe import About, Recipe, Scalar, Status
from kvtune.data.run.types import Run
from kvtune.lab.setup.offload_flags import tier_given
from kvtune.lab.setup.setup import USUAL, Setup
from kvtune.reading.analysis.comparison.compare import Figure
from kvtune.reading.analysis.figures import OF_RECIPES

NOT_FOR_RECIPES = (
    "num_gpu_blocks_override",
    "kv_cache_memory_bytes",
    "max_model_len",
    "gpu_memory_utilization",
)
"""Sizes that suit one machine only. They are kept as evidence, and the recipe does not set them."""


def recipe_of(
    setup: Setup, objective: Objective, confirmed: Confirmed, side: Contender, simulated: int
) -> Recipe:
    """Return the recipe of a setting that ran on the engine. `simulated`: the number of simulated trials."""
    summary = side.trials[-1].summary
    evidence = {
        **_evidence(setup, objective),
        "simulated_trials": simulated,
        "runs": _runs(side),
        "baseline_runs": _runs(confirmed.baseline),
        "figures": {f.path.replace(".", "_"): _figure(f) for f in confirmed.figures if f.path in OF_RECIPES},
    }
    if confirmed.drift is not None:
        evidence["drift_ttft"] = confirmed.drift
    if confirmed.baseline.runs:
        engine = confirmed.baseline.runs[0].header.engine
        evidence["pool"] = {
            "blocks": engine.num_blocks,
            "block_tokens": engine.block_size,
            "async_scheduling": engine.async_scheduling,
        }
        evidence["served"] = _served(confirmed.baseline.runs[0])
    return _recipe(setup, side.settings, summary, "confirmed", evidence, confirmed.why)


def _served(run: Run) -> dict[str, object]:
    """Return facts that may differ on another machine, if known: stock's batch limits, the GPU's memory."""
    settings, gpus = run.header.engine.settings, run.header.extra.gpus
    served = {name: settings.get(name) for name in ("max_num_batched_tokens", "max_num_seqs")}
    served["gpu_memory_bytes"] = gpus[0].memory_bytes if gpus else None
    return {name: value for name, value in served.items() if value is not None}


def simulated_recipe(
    setup: Setup, objective: Objective, best: Trial, baseline: Trial, simulated: int
) -> Recipe:
    """Return a recipe with status `simulated`, which no engine has confirmed."""
    evidence = {
        **_evidence(setup, objective),
        "simulated_trials": simulated,
        "simulated": objective.of(best.summary) or 0.0,
        "simulated_baseline": objective.of(baseline.summary) or 0.0,
    }
    return _recipe(setup, best.settings, best.summary, "simulated", evidence, "not confirmed on an engine")


def _recipe(
    setup: Setup,
    settings: Settings,
    summary: Mapping[str, Any],
    status: Status,
    evidence: dict[str, object],
    note: str,
) -> Recipe:
    """Return the recipe of a set-up with these settings. `summary`: of a run of it, for its engine and Python."""
    engine = summary.get("engine", {})
    chosen: dict[str, Scalar] = {}
    for name in ENGINE:
        given = flag_value(setup.engine_args, name.replace("_", "-"))
        if given is not None and name not in NOT_FOR_RECIPES:
            chosen[name] = _number_or_word(given)
    chosen |= tier_given(setup.engine_args)
    chosen.update(engine_part(settings))
    about = About(
        model=setup.model,
        device=engine.get("device", ""),
        device_name=engine.get("device_name", ""),
        state_dtype=engine.get("state_dtype", ""),
        vllm=setup.vllm,
        kvtune=__version__,
        python=summary.get("python", ""),
        status=status,
        core=setup.core,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        note=note,
    )
    core = {**setup.core_settings, **core_part(settings)}
    return Recipe(recipe=about, engine=chosen, core=core, evidence=evidence)


def _number_or_word(given: str) -> Scalar:
    if given.isdigit():
        return int(given)
    try:
        return float(given)
    except ValueError:
        return given.lower()


def _evidence(setup: Setup, objective: Objective) -> dict[str, object]:
    fields = setup.filed()
    return {
        "objective": ",".join(objective.names),
        "workload": fields["spec"],
        **{name: fields[name] for name in ("seed", "workload_hash")},
        "engine_args": without_secrets(setup.engine_args),
        **{name: fields[name] for name in ("block_tokens", "dummy")},
        **{name: fields[name] for name, usual in USUAL.items() if fields[name] != usual},
    }


def _runs(side: Contender) -> list[str]:
    return [Path(t.run_file).name for t in side.trials if t.run_file]


def _figure(figure: Figure) -> dict[str, object]:
    fields = {
        "baseline": figure.a,
        "recipe": figure.b,
        "difference": figure.difference,
        "relative": figure.relative,
        "low": figure.low,
        "high": figure.high,
        "verdict": figure.verdict,
    }
    return {name: value for name, value in fields.items() if value is not None}


def as_evidenced(setup: Setup, recipe: Recipe) -> Setup:
    """Return the set-up simulated with the pool and scheduling of the evidence's engine, if the recipe has them."""
    pool = recipe.evidence.get("pool", {})
    try:
        blocks, tokens = (msgspec.convert(pool.get(name, 0), int) for name in ("blocks", "block_tokens"))
        ahead = msgspec.convert(pool.get("async_scheduling"), bool | None)
    except msgspec.ValidationError:
        return setup.replayed()
    return setup.with_pool(blocks, tokens).replayed(async_scheduling=ahead)
