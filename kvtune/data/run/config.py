"""Defaults of options from a file: `kvtune.toml`, or `[tool.kvtune]` in pyproject.toml, here or in a folder above.

The search ends at the root of a repository or at the home folder. Files that another user owns are ignored. A file is
read with limits: whatever is wrong with it is one line (`Config.problem`), and never ends a command.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtune.base.bounded import MOST_TOML, decode_toml
from kvtune.base.errors import UsageError, did_you_mean
from kvtune.base.files import home_folder

if TYPE_CHECKING:
    from kvtune.data.run.extras import SloName


OUTPUT_VARIABLE = "KVTUNE_OUTPUT"
KEYS: dict[str, type] = {"output": str, "slo": str, "open": bool, "quiet": bool}
"""Settings that a file may have. What is measured can be set only on the command line."""
EXAMPLES = {"output": '"runs"', "slo": '"ttft=500,tpot=50"', "open": "true", "quiet": "true"}
REPORTS = Path("reports")
"""Where commands write unless -o, KVTUNE_OUTPUT or a file names another folder."""
MOST_SAID, MOST_SHOWN = 3, 60
"""What the line about a file says at most: mistakes, and characters of each value."""
MOST_NAME_BYTES = 255
MOST_PATH_BYTES = 2048


@dataclass(frozen=True, slots=True)
class Config:
    """The settings of the nearest file; `path` is None if there is no file. `problem`: what is left out, and why."""

    path: Path | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""

    @property
    def output(self) -> Path | None:
        """The output folder; a relative path in the file starts at the file's folder."""
        if self.path is None or "output" not in self.values:
            return None
        folder = self.path.parent / Path(self.values["output"]).expanduser()
        try:
            return folder.relative_to(Path.cwd())
        except (ValueError, OSError):
            return folder


def read_config(start: Path | None = None) -> Config:
    """Return the nearest file's settings, without those that are wrong."""
    try:
        here = (start or Path.cwd()).absolute()
    except OSError:  # the current folder was removed
        return Config()
    for folder in (here, *here.parents):
        for name in ("kvtune.toml", "pyproject.toml"):
            path = folder / name
            if not _is_own(path):
                continue
            try:
                table = _table(path)
            except UsageError as error:
                return Config(path, problem=f"{path}: {error.message}; it is left out")
            if table is not None:
                return _checked(table, path)
        if _is_top(folder):
            break
    return Config()


def _is_top(folder: Path) -> bool:
    """Whether the folder is a repository's root or the home folder, or cannot be looked at."""
    try:
        return (folder / ".git").exists() or folder == home_folder()
    except OSError:  # no permission
        return True


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
    """Return kvtune's table; None if a pyproject.toml has none. UsageError if a file with settings is not readable."""
    mine = path.name == "kvtune.toml"
    data = b""
    try:
        with path.open("rb") as file:
            data = file.read(MOST_TOML + 1)
        if not mine and b"kvtune" not in data:
            return None
        read = decode_toml(data)
    except (OSError, ValueError) as error:
        if not mine and b"[tool.kvtune]" not in data:
            return None  # another tool reports this error: the file may have nothing for kvtune
        raise UsageError(f"not readable TOML: {error}") from error
    if mine:
        return read
    tools = read.get("tool")
    table = tools.get("kvtune") if isinstance(tools, dict) else None
    if table is not None and not isinstance(table, dict):
        raise UsageError(f"[tool.kvtune] is not a table; it has {', '.join(KEYS)}")
    return table


def _checked(table: Mapping[str, Any], path: Path) -> Config:
    """Return the settings that are right, and one line about the others."""
    wrong = {key: why for key, value in table.items() if (why := _wrong(key, value))}
    problem = f"{path}: {'; '.join(list(wrong.values())[:MOST_SAID])}; left out" if wrong else ""
    return Config(path, {key: value for key, value in table.items() if key not in wrong}, problem)


def _wrong(key: str, value: object) -> str:
    """Return what is wrong with a setting; "" if nothing is."""
    kind = KEYS.get(key)
    if kind is None:
        name = key[:MOST_SHOWN]
        return f"kvtune has no setting {name} ({did_you_mean(name, KEYS)}it has {', '.join(KEYS)})"
    if type(value) is not kind:
        expected = "true or false" if kind is bool else "text in quotes"
        return f"{key} = {_shown(value)} is not {expected} (write {key} = {EXAMPLES[key]})"
    if isinstance(value, str) and not value.isprintable():
        return f"{key} = {_shown(value)} holds a control character"
    if key == "slo":
        try:
            read_slo(str(value))
        except UsageError as error:
            return f"{key}: {error.message} ({error.hint})"
    return _wrong_folder(str(value)) if key == "output" else ""


def _wrong_folder(text: str) -> str:
    names = [os.fsencode(name) for name in text.split("/")]
    if len(os.fsencode(text)) > MOST_PATH_BYTES or max(map(len, names)) > MOST_NAME_BYTES:
        return f"output = {_shown(text)} is too long for a folder"
    try:
        Path(text).expanduser()
    except RuntimeError:
        return f"output = {_shown(text)} names the home folder of a user who has none"
    return ""


def _shown(value: object) -> str:
    """Return a value of the file for one line, cut where it is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits, deep nesting
        return f"a long {type(value).__name__}"
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}.."


LIMITS: dict[SloName, str] = {
    "ttft": "time to the first token",
    "tpot": "mean time per token after the first",
    "e2e": "time to the last token",
}


def read_slo(text: str) -> dict[str, float]:
    """Return the limits by name; none for an empty text. UsageError lists the names."""
    limits: dict[str, float] = {}
    for part in (p.strip() for p in text.split(",") if p.strip()):
        name, _, number = part.partition("=")
        try:
            value = float(number.removesuffix("ms"))
        except ValueError:
            value = 0.0
        if name.strip() not in LIMITS or not 0 < value < float("inf"):
            names = ", ".join(f"{n} ({what})" for n, what in LIMITS.items())
            raise UsageError(
                f"--slo {part} is not a limit", f"give NAME=MILLISECONDS, with NAME one of {names}"
            )
        limits[name.strip()] = value
    return limits
