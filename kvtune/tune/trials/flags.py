"""The settings of trials: which are the core's, which vLLM's, and whether a file may give them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvtune.analysis.study import Settings
from kvtune.errors import UsageError
from kvtune.knobs import CORE
from kvtune.recipe import Scalar, check_engine_settings


def core_part(settings: Mapping[str, Scalar]) -> Settings:
    return {name: value for name, value in settings.items() if name in CORE}


def check_settings(settings: Mapping[str, Scalar], where: str) -> None:
    """Raise UsageError if a file's trial has a setting that is neither the core's nor one that a file may set."""
    from kvtune.core.settings import parse

    check_engine_settings(engine_part(settings), where, "a trial's settings")
    try:
        parse(core_part(settings))
    except UsageError as error:
        raise UsageError(f"{where}: {error.message}", error.hint) from error


def packing_failure(summary: Mapping[str, Any]) -> str:
    """Return why the engine did not pack blocks although the settings ask for it; "" if there is no such failure."""
    core = summary.get("core", {})
    if core.get("parts", {}).get("packed") is not False:
        return ""
    notes = [str(note) for note in summary.get("notes", [])]
    return next(
        (n for n in notes if n.startswith("packed: ")), "packed: the model has no states beside attention"
    )


def engine_part(settings: Mapping[str, Scalar]) -> Settings:
    """Return the settings that are vLLM's own flags, by their names with underscores."""
    return {name: value for name, value in settings.items() if name not in CORE}
