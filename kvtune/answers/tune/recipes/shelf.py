"""Finds and lists recipes (shipped, in ./recipes and the output folder) and exports one as files for plain vLLM."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator
from pathlib import Path

from kvtune.base.errors import KvtuneError, UsageError, did_you_mean
from kvtune.base.files import creating, real
from kvtune.data.layout.models import NAMES, builtin, engine_defaults
from kvtune.data.recipe import Recipe, Scalar, in_vllms_names, read_recipe
from kvtune.data.run.output import output_folder

PACKAGED = Path(__file__).parents[3] / "recipes"  # in a wheel
CHECKOUT = Path(__file__).parents[4] / "recipes"
SHIPPED = (PACKAGED, CHECKOUT)


def folders() -> list[Path]:
    """Return the folders with recipes: those shipped with kvtune, then ./recipes and the output folder.

    The last two count only if they are this user's.
    """
    mine = [p for p in (Path("recipes"), output_folder()) if p.is_dir() and p.stat().st_uid == os.getuid()]
    return list(dict.fromkeys(real(p) for p in (*SHIPPED, *mine) if p.is_dir()))


def shipped(path: Path) -> bool:
    """Whether the recipe came with kvtune. What any other file says of itself, its maker says."""
    return real(path).parent in [real(folder) for folder in SHIPPED]


def named() -> Iterator[Path]:
    """Yield the recipes that are found by name. In a folder of this user, another user's file is not."""
    for folder in folders():
        for path in sorted(folder.glob("*.toml")):
            if shipped(path) or path.lstat().st_uid == os.getuid():
                yield path


def recipes() -> Iterator[tuple[Path, Recipe | None, str]]:
    """Yield each recipe file with its recipe, or with None and the reason why it cannot be used."""
    for path in named():
        try:
            yield path, load(path), ""
        except KvtuneError as error:
            yield path, None, error.message


def load(path: Path) -> Recipe:
    """Read a recipe and check its core settings."""
    from kvtune.plugin.core.settings import parse

    recipe = read_recipe(path)
    try:
        parse(recipe.core)
    except UsageError as error:
        raise UsageError(f"{path}: {error.message}", error.hint) from error
    return recipe


def find(name: str) -> Path:
    """Return the path of a recipe, given as a file or by its name in `folders` (without .toml).

    A bare name is a recipe in `folders`, those shipped with kvtune first; a file beside it of that name is ./NAME.
    """
    is_name = "/" not in name and not name.endswith(".toml")
    file = Path(name) if Path(name).is_file() else None
    if file is not None and not is_name:
        return file
    if path := next((p for p in named() if p.stem == name.removesuffix(".toml")), file):
        return path
    if Path(name).is_dir():
        raise UsageError(
            f"{name} is a folder, not a recipe", "give a recipe's .toml file, or a recipe's name"
        )
    names = [path.stem for path in named()]
    hint = f"{did_you_mean(name.removesuffix('.toml'), names)}`kvtune recipe list` shows the recipes at hand"
    raise UsageError(f"no recipe {name}", hint)


def export(recipe: Recipe, folder: Path) -> list[Path]:
    """Write `config.yaml` and, for kvtune's core, `env.sh` for plain `vllm serve --config config.yaml`.

    Raise UsageError if either exists.
    PyYAML writes the recipe's values, and shlex quotes them; in comments they are JSON, one line of ASCII.
    """
    import yaml

    about = recipe.recipe
    head = f"a kvtune recipe for {about.model} on {about.device}, vLLM {about.vllm}, {about.status}"
    settings = {**_model(about.model), **in_vllms_names(recipe.engine)}
    named = {name.replace("_", "-"): "None" if v == "none" else v for name, v in settings.items()}
    lines = [
        f"# {json.dumps(head)}",
        "# `vllm serve --config config.yaml`; a MODEL named before --config is served instead of this one",
        yaml.safe_dump(named, sort_keys=False, width=float("inf")).rstrip("\n"),
    ]
    shell = [
        f"# {json.dumps(head)}",
        "# source this file before each `vllm serve --config config.yaml`; kvtune must be installed beside vLLM",
        "export KVTUNE_CORE=kvtune",
        "# Counters, shown on /metrics: the server makes the folder and removes it.",
        'KVTUNE_METRICS_DIR="${TMPDIR:-/tmp}/kvtune-serve-$$-$(date +%s%N)"',
        "export KVTUNE_METRICS_DIR",
        f"export KVTUNE_SET={shlex.quote(json.dumps(recipe.core, sort_keys=True))}",
    ]
    config, env = folder / "config.yaml", folder / "env.sh"
    files = [(config, lines)] if about.core == "stock" else [(config, lines), (env, shell)]
    made: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in files:
            with creating(path) as file:
                file.write(("\n".join(text) + "\n").encode())
            made.append(path)
    except OSError as error:
        for path in made:  # leave both files or neither
            path.unlink(missing_ok=True)
        if isinstance(error, FileExistsError):
            taken = next((path for path, _ in files if os.path.lexists(path)), folder)
            raise UsageError(f"{taken} exists", "give another folder with -o DIR") from error
        raise KvtuneError(
            f"cannot write to {folder}: {error.strerror or error}", "choose another -o DIR"
        ) from error
    return made


def _model(name: str) -> dict[str, Scalar]:
    """Return the model's entries in config.yaml; a built-in model is a folder in kvtune, plus the flags it needs."""
    if name not in NAMES:
        return {} if builtin(name) else {"model": name}
    needed = {n.replace("-", "_"): value or True for n, value in engine_defaults(name).items()}
    if needed.pop("no_enable_prefix_caching", False):
        needed["enable_prefix_caching"] = False
    return {"model": str(builtin(name)), "served_model_name": name, **needed}
