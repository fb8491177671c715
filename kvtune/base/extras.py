"""Packages beyond the base, by what a person does: which command needs which extra, and what to install. Pure."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from kvtune.base.errors import UsageError

PAGES = {"jinja2": "jinja2", "altair": "altair", "vl_convert": "vl-convert-python"}
EXTRAS: dict[str, dict[str, str]] = {"report": PAGES, "tune": {"optuna": "optuna", **PAGES}, "profile": PAGES}
"""The modules that the commands of each extra import, and the package of each module."""

NEEDS = {
    "profile": "profile",
    "sweep": "tune",
    "tune": "tune",
    "report": "report",
    "recipe verify": "profile",
}
"""The extra without which each of these commands does no work. All others run with the base alone."""


def require(extra: str, what: str) -> None:
    """Raise UsageError if a package of the extra is not installed. `what`: what was asked for, e.g. `kvtune report`."""
    missing = [package for module, package in EXTRAS[extra].items() if find_spec(module) is None]
    if missing:
        names = " and ".join([", ".join(missing[:-1]), missing[-1]] if len(missing) > 1 else missing)
        raise UsageError(
            f"{what} needs {names}, which {'are' if len(missing) > 1 else 'is'} not installed",
            f"pip install 'kvtune[{extra}]'",
        )


def checked(name: str, command: Callable[..., Any]) -> Callable[..., Any]:
    """Return a command that first checks that its extra is installed, so that no work is lost."""
    extra = NEEDS.get(name)
    if extra is None:
        return command

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        require(extra, f"kvtune {name}")
        return command(*args, **kwargs)

    run.__signature__ = inspect.signature(command, eval_str=True)  # type: ignore[attr-defined]
    return run
