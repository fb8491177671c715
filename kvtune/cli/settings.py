"""What several commands parse alike: `--set core.NAME=VALUE`, a recipe, the choice of core and of instruments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from kvtune.core.settings import KNOBS, LISTED
from kvtune.errors import UsageError
from kvtune.recipe import engine_flags

PROBES = ("off", "light", "types", "sites", "full")


def core_choice(text: str) -> Literal["kvtune", "stock"]:
    if text == "kvtune":
        return "kvtune"
    if text == "stock":
        return "stock"
    raise UsageError(f"--core {text} is not a core", "--core takes kvtune or stock")


def probe_choice(text: str) -> str:
    if text not in PROBES:
        raise UsageError(f"--probe {text} is not a level", f"--probe takes {', '.join(PROBES)}")
    return text


def core_settings(assignments: Sequence[str]) -> dict[str, Any]:
    """`["core.slack=128"]` -> `{"slack": 128}`, each value checked against its knob."""
    found: dict[str, Any] = {}
    for text in assignments:
        name, equals, value = text.partition("=")
        key = name.removeprefix("core.").replace("-", "_")
        if not equals or not name.startswith("core."):
            raise UsageError(f"--set {text} is not core.NAME=VALUE", f"NAME is one of {', '.join(LISTED)}")
        if key not in KNOBS:
            raise UsageError(f"--set {text}: the core has no setting {key}", f"it has {', '.join(LISTED)}")
        found[key] = KNOBS[key].read(value)
    return found


def with_recipe(
    recipe: str, assignments: Sequence[str], flags: Sequence[str], *, model: str, anyway: bool
) -> tuple[dict[str, Any], list[str]]:
    """Core settings and engine flags; what stands on the command line wins over the recipe (a file or a name)."""
    own = core_settings(assignments)
    if not recipe:
        return own, list(flags)
    from kvtune.tune.recipes.shelf import find, load
    from kvtune.tune.recipes.verify import refuse_foreign

    path = find(recipe)
    read = load(path)
    refuse_foreign(read, str(path), anyway, model=model)
    given = core_settings([f"core.{name}={value}" for name, value in read.core.items()])
    return {**given, **own}, [*engine_flags(read.engine), *flags]
