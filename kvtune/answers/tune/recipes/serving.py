"""Makes and checks the command and environment of `vllm serve` for a model and a recipe. Starts nothing."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex

import msgspec

from kvtune.answers.tune.recipes.shelf import load
from kvtune.answers.tune.recipes.verify import refuse_foreign, usable
from kvtune.base.errors import UsageError
from kvtune.base.files import claim
from kvtune.base.legal import Value
from kvtune.base.scratch import PREFIX
from kvtune.data.flags import flag_value
from kvtune.data.recipe import engine_flags
from kvtune.lab.engine.profile import check_machine
from kvtune.lab.engine.served import command_of
from kvtune.lab.setup.offload_flags import joined
from kvtune.lab.setup.resolve import is_cpu_build, resolve
from kvtune.lab.setup.setup import CoreName


@dataclass(frozen=True, slots=True)
class Serving:
    """What to exec: `command` with `environment`. `notes`: the recipe's settings that have no effect here."""

    command: list[str]
    environment: dict[str, str]
    notes: tuple[str, ...] = ()


def serving(
    model: str,
    recipe_path: Path | None,
    record: Path | None,
    flags: Sequence[str],
    environ: Mapping[str, str],
    *,
    core: CoreName | None = None,
    core_settings: Mapping[str, Value] | None = None,
    anyway: bool = False,
    dummy: bool = False,
) -> Serving:
    """Return the command for a model. `core`, `core_settings` and flags after `--` override the recipe's.

    `core`: None without a choice; then the recipe's, or kvtune's.
    """
    recipe = load(recipe_path) if recipe_path is not None else None
    if recipe is not None:
        refuse_foreign(recipe, str(recipe_path), anyway, model=model)
    chosen = core or (recipe.recipe.core if recipe is not None else "kvtune")
    settings = {**(recipe.core if recipe is not None and chosen == "kvtune" else {}), **(core_settings or {})}
    if settings and chosen == "stock":
        raise UsageError("--set is for kvtune's core, and stock was asked for", "leave one of them out")
    kept, inert = usable(recipe) if recipe is not None else ({}, [])
    fixed = engine_flags({n: v for n, v in kept.items() if flag_value(flags, n.replace("_", "-")) is None})
    given = joined(fixed, flags)
    resolved = resolve(model, dummy=dummy, engine_args=given)
    check_machine(given, cpu_build=is_cpu_build())
    command = command_of(model, resolved.args)
    environment = {
        **environ,
        "KVTUNE_CORE": chosen,
        "KVTUNE_METRICS_DIR": str(Path(tempfile.gettempdir()) / f"{PREFIX}serve-{token_hex(6)}"),
    }
    environment.pop("KVTUNE_RECIPE", None)
    environment["KVTUNE_SET"] = msgspec.json.encode(settings).decode()
    if record is not None:
        environment["KVTUNE_RECORD"] = str(_new_file(record))
    if resolved.offline:
        environment["HF_HUB_OFFLINE"] = "1"
    return Serving(command, environment, tuple(inert))


def _new_file(path: Path) -> Path:
    """Create the trace file now, so that an unwritable folder is reported before the engine starts."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        claim(path)
    except FileExistsError as error:
        raise UsageError(f"--record {path} exists", "give a new file: recordings are not appended") from error
    except OSError as error:
        raise UsageError(
            f"--record {path} cannot be written: {error.strerror or error}", "choose another place"
        ) from error
    return path.resolve()
