"""Checks whether a recipe's evidence holds here: runs its workload with stock and with the recipe on the engine.

A recipe with status `simulated` is verified in simulation and keeps that status. A recipe made with another vLLM or
kvtune is first simulated with the installed versions: the answer says whether its gain holds in simulation, on the
engine, or both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from kvtune import __version__
from kvtune.answers.tune.confirm import Bout, Contender, confirm
from kvtune.answers.tune.objective import Objective, objective
from kvtune.answers.tune.recipes.make import as_evidenced
from kvtune.answers.tune.result import Place, Settings, Trial
from kvtune.answers.tune.space.model import installed_device, installed_state_dtype
from kvtune.answers.tune.trials.journal import StudyJournal
from kvtune.answers.tune.trials.run import STOCK, PlannedTrial, Trials
from kvtune.base.errors import KvtuneError, UsageError
from kvtune.base.scratch import scratch
from kvtune.base.units import count
from kvtune.data.layout.models import builtin
from kvtune.data.recipe import Recipe, Scalar, differences
from kvtune.data.run.signature import identity
from kvtune.data.show.parts import Document, Section
from kvtune.lab.engine.experiment import BASELINE
from kvtune.lab.lab import LAB, Lab
from kvtune.lab.setup.platform import here as this_platform
from kvtune.lab.setup.resolve import check_engine
from kvtune.lab.setup.setup import Setup
from kvtune.plugin.vllm.names import without_effect
from kvtune.requests.loads.spec import build

POOL_SHARE = 0.1
"""Pools that differ by more than this share are reported."""


def expired(recipe: Recipe) -> list[str]:
    """Return the recipe's versions that differ from the installed ones, so that its evidence may not hold."""
    return differences(recipe, vllm=check_engine(), kvtune=__version__)


def other_states(recipe: Recipe) -> list[str]:
    """Return a note if recurrent states have another dtype here: blocks and hits differ, but the recipe may be used."""
    about, flags = recipe.recipe, recipe.evidence.get("engine_args", [])
    if builtin(about.model) is None or (about.device and about.device != installed_device()):
        return []  # a model that only the file names is not looked up
    here = installed_state_dtype(about.model, [str(flag) for flag in flags])
    return differences(recipe, state_dtype=here)


def refuse_foreign(
    recipe: Recipe, where: str, anyway: bool, *, model: str = "", versions: bool = True
) -> None:
    """Raise UsageError for a recipe of another model or device or, with `versions`, of other versions."""
    if anyway:
        return
    if versions and (others := expired(recipe)):
        raise UsageError(
            f"{where} has expired, it was made with {', '.join(others)}",
            "see whether its gain survives (kvtune recipe verify), tune again, or add --anyway to use it",
        )
    about, here = recipe.recipe, installed_device()
    if model and about.model != model:
        raise UsageError(
            f"{where} is for the model {about.model}, not {model}",
            "tune this model, or add --anyway to use it",
        )
    # Every machine can verify a recipe that was measured on a simulated device (--on host).
    timed = not versions and recipe.evidence.get("engine_on") == "host"
    if about.device and here != about.device and not timed:
        raise UsageError(
            f"{where} is for the device {about.device}, this vLLM runs on {here}",
            "tune on this device, or add --anyway to use it",
        )
    if not timed and here == "cuda" == about.device and (other := _other_gpu(about.device_name)):
        raise UsageError(
            f"{where} is for {about.device_name}, this machine has {other}",
            "tune on this GPU, or add --anyway to use it: pool, chunk and max_num_seqs differ here",
        )


def _other_gpu(name: str) -> str:
    """Return the name of this machine's GPU if it is not `name`; "" if they are equal or either is unknown."""
    platform = this_platform()
    return platform.name if name and platform.memory_bytes and platform.name != name else ""


def other_pool(recipe: Recipe, blocks: int, block_tokens: int) -> str:
    """Return a note if the pool differs by over a tenth from the one of the recipe's confirmation, else ""."""
    pool = recipe.evidence.get("pool", {})
    confirmed = int(pool.get("blocks", 0)) * int(pool.get("block_tokens", 0))
    tokens = blocks * block_tokens
    if not confirmed or not tokens or abs(tokens - confirmed) <= POOL_SHARE * confirmed:
        return ""
    return (
        f"the recipe was confirmed in a pool of {count(confirmed)} tokens, this one has {count(tokens)}: "
        "its gain may be another"
    )


def usable(recipe: Recipe) -> tuple[dict[str, Scalar], list[str]]:
    """Return the recipe's settings that this vLLM acts on, and a line for each that it ignores."""
    left_out = {name: why for name in recipe.engine if (why := without_effect(name))}
    kept = {name: value for name, value in recipe.engine.items() if name not in left_out}
    return kept, [f"{name}={recipe.engine[name]} has no effect here: {why}" for name, why in left_out.items()]


class ListedRecipe(msgspec.Struct, frozen=True, kw_only=True):
    """A row of `kvtune recipe list`. Without a model: an unusable file."""

    name: str
    file: str
    shipped: bool
    state: str
    model: str = ""
    device: str = ""


class Listing(msgspec.Struct, frozen=True):
    recipes: list[ListedRecipe]

    def document(self) -> Document:
        facts = []
        for row in self.recipes:
            maker = "" if row.shipped or not row.model else ", as its maker says"
            facts.append(
                (row.name, f"{row.model} on {row.device}, {row.state}{maker}" if row.model else row.state)
            )
        return Document(
            name="kvtune recipe list",
            subject="recipes",
            headline=f"{len(facts)} recipes" if facts else "no recipes here",
            sections=(Section("recipes", "Recipes", facts=tuple(facts)),),
            identity=identity("recipes"),
            closing="" if facts else "`kvtune tune MODEL -w WORKLOAD` writes one.",
        )


class Verified(msgspec.Struct, frozen=True, kw_only=True):
    """`kvtune recipe verify --json`. `differences`: versions and dtypes that are not those of the evidence."""

    recipe: str = ""
    holds: bool
    on: Place = "sim"
    text: str
    figures: list[dict[str, Any]] = []
    drift_ttft: float | None = None
    differences: list[str] = []
    pool: dict[str, int] | None = None

    def document(self) -> Document:
        return Document(
            name="kvtune recipe verify",
            subject=self.recipe,
            headline=f"{self.recipe}: {self.text}",
            sections=(),
            identity=identity("verify", self.recipe),
        )


def state_of(recipe: Recipe) -> str:
    """Return the state of a recipe here: confirmed, simulated, expired, .."""
    about = recipe.recipe
    try:
        versions = expired(recipe)
    except KvtuneError:
        return f"{about.status} with vLLM {about.vllm}; no vLLM is installed here"
    state = f"expired: {', '.join(versions)}" if versions else about.status
    if other := other_states(recipe):
        state += f", made with {other[0]}"
    if about.device and about.device != (here := installed_device()):
        return f"for another device than this {here}, {state}"
    return state


def verify(
    recipe: Recipe,
    where: str,
    *,
    rounds: int,
    output: Path,
    say: Callable[[Trial], None],
    anyway: bool = False,
    model: str = "",
    trace: Path | None = None,
    trusted: bool = False,
    lab: Lab = LAB,
) -> Verified:
    """Measure again. UsageError for another device or workload, or without evidence."""
    refuse_foreign(recipe, where, anyway, model=model, versions=False)
    others = expired(recipe)
    setup = Setup.of_recipe(recipe, where, model=model, trace=trace, trusted=trusted)
    kept, left_out = usable(recipe)
    settings = {n: value for n, value in recipe.knobs.items() if n in kept or n not in recipe.engine}
    goal = objective(str(recipe.evidence.get("objective", "")))
    workload = build(setup.load.spec, seed=setup.load.seed)
    if workload.hash != setup.load.hash:
        raise UsageError(
            f"{where}: the workload {setup.load.spec!r} is not the one of the evidence any more",
            "restore its trace file, or tune again",
        )
    simulated = ""
    if recipe.recipe.status == "simulated":
        outcome = _in_simulation(as_evidenced(setup, recipe), settings, goal, lab)
    else:
        if others and goal.replayed:
            survival = _survival(as_evidenced(setup, recipe), settings, goal, lab)
            simulated = f"made with {', '.join(others)}; simulated first, it {survival}; engine: "
        outcome = on_engine(setup, settings, goal, rounds, output, say, lab)
    if others and not simulated:
        simulated = f"made with {', '.join(others)}; "
    other = other_states(recipe)
    pool = [line for line in (other_pool(recipe, **outcome.pool),) if line] if outcome.pool else []
    remark = f"; it was made with {other[0]}: blocks and hits differ from its evidence" if other else ""
    remark += "".join(f"; {line}" for line in (*left_out, *pool))
    return replace(outcome, text=simulated + outcome.text + remark, differences=[*others, *other])


def on_engine(
    setup: Setup,
    settings: Settings,
    objective: Objective,
    rounds: int,
    output: Path,
    say: Callable[[Trial], None],
    lab: Lab = LAB,
) -> Verified:
    output.mkdir(parents=True, exist_ok=True)
    with (
        scratch("verify", output, hidden=True) as folder,
        StudyJournal(folder / "verify.jsonl", "verify", setup) as journal,
        Trials(setup, journal, say, lab, output=folder) as trials,
    ):
        sides = [Contender("trial", settings)]
        outcome = confirm(
            Bout(trials), Contender(BASELINE, {}), sides, objective, rounds=rounds, budget_s=inf
        )
    if outcome.leader is None:
        raise KvtuneError(f"the recipe's engine failed: {outcome.why}", "see `kvtune doctor`, or tune again")
    holds = outcome.winner is not None
    engine = outcome.baseline.runs[0].header.engine
    return Verified(
        holds=holds,
        on="engine",
        pool={"blocks": engine.num_blocks, "block_tokens": engine.block_size},
        text=f"{'holds' if holds else 'does not hold'}: {outcome.why}",
        figures=[asdict(f) for f in outcome.figures],
        drift_ttft=outcome.drift,
    )


def _survival(setup: Setup, settings: Settings, objective: Objective, lab: Lab) -> str:
    """Say whether the recipe's gain holds in the simulator, or why this vLLM cannot be simulated."""
    try:
        return _in_simulation(setup, settings, objective, lab).text
    except KvtuneError as error:
        return f"could not be ({error.message})"


def _in_simulation(setup: Setup, settings: Settings, objective: Objective, lab: Lab) -> Verified:
    def failed(plan: PlannedTrial, error: KvtuneError) -> None:
        raise KvtuneError(f"the simulation failed: {error.message}", error.hint)

    with Trials(setup.replayed(), lab=lab, failed=failed) as trials:
        stock, mine = (objective.of(trial.summary) for trial in trials.run([STOCK, PlannedTrial(settings)]))
    holds = stock is not None and mine is not None and objective.better * (mine - stock) > 0
    shown = f"{objective.name} {mine} against stock's {stock}, in simulation only"
    figures = [{"path": objective.path, "a": stock, "b": mine}]
    return Verified(holds=holds, text=f"{'holds' if holds else 'does not hold'}: {shown}", figures=figures)
