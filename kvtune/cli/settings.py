"""Parses what several commands share: `--set core.NAME=VALUE`, a recipe, the choice of core, a study's set-up."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kvtune.base.errors import UsageError, did_you_mean
from kvtune.base.legal import Value
from kvtune.cli.options import CoreName
from kvtune.data.flags import settings_given
from kvtune.data.knobs import CORE
from kvtune.data.recipe import engine_flags
from kvtune.data.run.types import Run
from kvtune.lab.setup.offload_flags import joined

if TYPE_CHECKING:
    from kvtune.data.knobs import ModelFacts
    from kvtune.lab.setup.setup import Setup
    from kvtune.requests.types import Workload


class FromRecipe(NamedTuple):
    """A recipe with the command line's changes. `alone`: vLLM's settings that only the recipe gives."""

    core: CoreName
    core_settings: dict[str, Value]
    flags: list[str]
    alone: frozenset[str]


def core_settings(assignments: Sequence[str]) -> dict[str, Value]:
    """Parse `["core.slack=128"]` to `{"slack": 128}`; each value is checked against its knob."""
    settings: dict[str, Value] = {}
    for text in assignments:
        name, equals, value = text.partition("=")
        key = name.removeprefix("core.").replace("-", "_")
        if not equals or not name.startswith("core."):
            raise UsageError(f"--set {text} is not core.NAME=VALUE", f"NAME is one of {', '.join(CORE)}")
        if key not in CORE:
            hint = f"{did_you_mean(key, CORE)}it has {', '.join(CORE)}"
            raise UsageError(f"--set {text}: the core has no setting {key}", hint)
        settings[key] = CORE[key].checked(value)
    return settings


def with_recipe(
    recipe: str,
    assignments: Sequence[str],
    flags: Sequence[str],
    *,
    model: str,
    core: CoreName | None,
    anyway: bool,
) -> FromRecipe:
    """Merge a recipe (a file or a name) with the command line, whose values override the recipe's.

    `core`: None if the command line names none.
    """
    given = core_settings(assignments)
    if not recipe:
        return FromRecipe(core or "kvtune", given, list(flags), frozenset())
    from kvtune.answers.tune.recipes.shelf import find, load
    from kvtune.answers.tune.recipes.verify import refuse_foreign, usable

    path = find(recipe)
    loaded = load(path)
    refuse_foreign(loaded, str(path), anyway, model=model)
    chosen = core or loaded.recipe.core
    settings = core_settings([f"core.{name}={value}" for name, value in loaded.core.items()])
    kept, left_out = usable(loaded)
    for line in left_out:
        print(f"recipe: {line}", file=sys.stderr)
    typed = settings_given(flags)
    alone = frozenset(name for name in kept if name.replace("_", "-") not in typed)
    return FromRecipe(chosen, {**settings, **given}, joined(engine_flags(kept), flags), alone)


def say_other_pool(recipe: str, run: Run) -> None:
    """Print a note if the run's pool differs from the one in which its recipe was confirmed."""
    from kvtune.answers.tune.recipes.shelf import find, load
    from kvtune.answers.tune.recipes.verify import other_pool

    engine = run.header.engine
    if remark := other_pool(load(find(recipe)), engine.num_blocks, engine.block_size):
        print(f"recipe: {remark}", file=sys.stderr)


def set_up(query: Any, slo: dict[str, float]) -> tuple[Setup, Workload, ModelFacts]:
    """Return the set-up that `sweep` or `tune` asks for. Warn if the model's windows and states are not known."""
    from kvtune.answers.tune.trials import setup as setups
    from kvtune.lab.device.settings import nominal
    from kvtune.lab.setup.setup import Real

    setup, work, facts = setups.set_up(
        query.model,
        setups.workload_spec(query.workload, query.trace),
        seed=query.seed,
        core=query.core,
        engine_args=list(query.flags),
        dummy=query.dummy,
        slo=slo,
        device=nominal() if query.on == "host" else Real(),
        like=query.platform,
    )
    if facts.unknown:
        print(
            f"{setup.model}: windows and states are not known, so only what suits every model is searched, the core's "
            f"defaults among it: {facts.unknown}",
            file=sys.stderr,
            flush=True,
        )
    return setup, work, facts
