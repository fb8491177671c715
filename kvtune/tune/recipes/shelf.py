"""Finds and lists recipes (shipped, in ./recipes and the output folder) and exports one as files for plain vLLM."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from kvtune.engine.models import NAMES, builtin, engine_defaults
from kvtune.errors import KvtuneError, UsageError, did_you_mean
from kvtune.recipe import Recipe, Scalar, in_vllms_names, read_recipe
from kvtune.run.config import output_folder

PACKAGED = Path(__file__).parents[2] / "recipes"  # in a wheel
CHECKOUT = Path(__file__).parents[3] / "recipes"


def folders() -> list[Path]:
    """Where recipes are looked for: shipped with kvtune, then ./recipes and the output folder."""
    places = (PACKAGED, CHECKOUT, Path("recipes"), output_folder())
    existing = dict.fromkeys(p.resolve() for p in places if p.is_dir())
    return list(existing)


def recipes() -> Iterator[tuple[Path, Recipe | None, str]]:
    """Each recipe file, with the recipe or the reason why it cannot be used."""
    for folder in folders():
        for path in sorted(folder.glob("*.toml")):
            try:
                yield path, load(path), ""
            except KvtuneError as error:
                yield path, None, error.message


def load(path: Path) -> Recipe:
    """Read a recipe and check its core settings."""
    from kvtune.core.settings import parse

    recipe = read_recipe(path)
    try:
        parse(recipe.core)
    except UsageError as error:
        raise UsageError(f"{path}: {error.message}", error.hint) from error
    return recipe


def find(name: str) -> Path:
    """A file, or the name of a recipe at hand (without .toml)."""
    if Path(name).is_file():
        return Path(name)
    for folder in folders():
        path = folder / f"{name.removesuffix('.toml')}.toml"
        if path.is_file():
            return path
    if Path(name).is_dir():
        raise UsageError(
            f"{name} is a folder, not a recipe", "give a recipe's .toml file, or a recipe's name"
        )
    known = [path.stem for folder in folders() for path in folder.glob("*.toml")]
    hint = f"{did_you_mean(name.removesuffix('.toml'), known)}`kvtune recipe list` shows the recipes at hand"
    raise UsageError(f"no recipe {name}", hint)


def export(recipe: Recipe, folder: Path) -> tuple[Path, Path]:
    """`config.yaml` and `env.sh` for plain `vllm serve --config config.yaml`. The folder must not hold them."""
    config, env = folder / "config.yaml", folder / "env.sh"
    for path in (config, env):
        if path.exists():
            raise UsageError(f"{path} exists", "give another folder with -o DIR")
    about = recipe.recipe
    head = f"# kvtune recipe for {about.model} on {about.device}, vLLM {about.vllm}, {about.status}"
    settings = {**_model(about.model), **in_vllms_names(recipe.engine)}
    lines = [
        head.replace("\n", " "),
        "# `vllm serve --config config.yaml`; a MODEL named before --config is served instead of this one",
        *(f"{name.replace('_', '-')}: {_yaml(value)}" for name, value in settings.items()),
    ]
    shell = [
        head.replace("\n", " "),
        "# source this file before each `vllm serve --config config.yaml`; kvtune must be installed beside vLLM",
        "export KVTUNE_CORE=kvtune",
        "# Counters, shown on /metrics: the server makes the folder and removes it.",
        'KVTUNE_METRICS_DIR="${TMPDIR:-/tmp}/kvtune-serve-$$-$(date +%s%N)"',
        "export KVTUNE_METRICS_DIR",
        f"export KVTUNE_SET={_shell(json.dumps(recipe.core, sort_keys=True))}",
    ]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        config.write_text("\n".join(lines) + "\n", encoding="utf-8")
        env.write_text("\n".join(shell) + "\n", encoding="utf-8")
    except OSError as error:
        raise KvtuneError(
            f"cannot write to {folder}: {error.strerror or error}", "choose another -o DIR"
        ) from error
    return config, env


def _model(name: str) -> dict[str, Scalar]:
    """The model in vLLM's configuration file; a built-in tiny one is a folder of ours with the flags it needs."""
    if name not in NAMES:
        return {} if builtin(name) else {"model": name}
    needed = {n.replace("-", "_"): value or True for n, value in engine_defaults(name).items()}
    if needed.pop("no_enable_prefix_caching", False):
        needed["enable_prefix_caching"] = False
    return {"model": str(builtin(name)), "served_model_name": name, **needed}


def _yaml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return str(value)
    return '"None"' if value == "none" else json.dumps(str(value))


def _shell(text: str) -> str:
    import shlex

    return shlex.quote(text)
