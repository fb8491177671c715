"""Defaults of options from a file: `kvtune.toml`, or `[tool.kvtune]` in pyproject.toml, here or in a folder above.

The search ends at the root of a repository or at the home folder. Files that another user owns are ignored.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtune.errors import UsageError, did_you_mean

OUTPUT_VARIABLE = "KVTUNE_OUTPUT"
KEYS: dict[str, type] = {"output": str, "slo": str, "open": bool, "quiet": bool}
"""Settings that a file may have. What is measured can be set only on the command line."""
EXAMPLES = {"output": '"runs"', "slo": '"ttft=500,tpot=50"', "open": "true", "quiet": "true"}
REPORTS = Path("reports")
"""Where commands write unless -o, KVTUNE_OUTPUT or a file names another folder."""


@dataclass(frozen=True, slots=True)
class Config:
    """The settings of the nearest file; `path` is None if there is no file."""

    path: Path | None = None
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def output(self) -> Path | None:
        """The output folder; a relative path in the file starts at the file's folder."""
        if self.path is None or "output" not in self.values:
            return None
        folder = self.path.parent / Path(self.values["output"]).expanduser()
        try:
            return folder.relative_to(Path.cwd())
        except ValueError:
            return folder


def read_config(start: Path | None = None) -> Config:
    """Return the nearest file's settings. UsageError names the file and the faulty key."""
    here = (start or Path.cwd()).absolute()
    for folder in (here, *here.parents):
        for name in ("kvtune.toml", "pyproject.toml"):
            path = folder / name
            if _is_own(path) and (table := _table(path)) is not None:
                return Config(path, _checked(table, path))
        if (folder / ".git").exists() or folder == Path.home():
            break
    return Config()


def _is_own(path: Path) -> bool:
    """Whether this user owns the path and the regular file it leads to, and others cannot replace it there."""
    try:
        named, file, folder = path.lstat(), path.stat(), path.parent.stat()
    except OSError:
        return False
    if not stat.S_ISREG(file.st_mode):
        return False
    me = os.getuid()
    open_to_all = folder.st_uid != me and folder.st_mode & stat.S_IWOTH
    return named.st_uid == file.st_uid == me and not open_to_all


def output_folder() -> Path:
    """Return the folder where commands without -o write, and where `last` looks for the newest run."""
    named = os.environ.get(OUTPUT_VARIABLE)
    return Path(named) if named else read_config().output or REPORTS


def _table(path: Path) -> Mapping[str, Any] | None:
    import tomllib

    try:
        read = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        if path.name == "pyproject.toml":
            return None  # another tool reports this error: the file may have nothing for kvtune
        raise UsageError(f"{path} is not readable TOML: {error}", "repair the file") from error
    if path.name == "kvtune.toml":
        return read
    tools = read.get("tool")
    table = tools.get("kvtune") if isinstance(tools, dict) else None
    if table is not None and not isinstance(table, dict):
        raise UsageError(f"{path}: [tool.kvtune] is not a table", f"it has {', '.join(KEYS)}")
    return table


def _checked(table: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    for key, value in table.items():
        kind = KEYS.get(key)
        if kind is None:
            hint = f"{did_you_mean(key, KEYS)}it has {', '.join(KEYS)}"
            raise UsageError(f"{path}: kvtune has no setting {key}", hint)
        if type(value) is not kind:
            expected = "true or false" if kind is bool else "text in quotes"
            raise UsageError(f"{path}: {key} = {value!r} is not {expected}", f"write {key} = {EXAMPLES[key]}")
    return table
