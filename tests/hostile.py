"""Strings that steer a terminal, put into every text of a run file or a recipe."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from kvtune.data.recipe import Recipe
from kvtune.data.run.file import read_run
from kvtune.data.run.types import Header, Run
from kvtune.data.show.terminal import STEERING

GOLDEN = Path(__file__).parent / "golden"
STEERS = "\x1b]0;owned\x07\x1b[2J\x9b31m\x85\r\u202egnp\u2066\x7f"
"""Sets the title, rings, clears the screen, colours (C1), returns, turns text around."""
FAKES = "\nkvtune: fake\x85kvtune: fake\u2028kvtune: fake"
"""Would begin lines that look like kvtune's own."""
NAMES = frozenset(
    ("source", "state", "started_at", "role", "kind", "hash", "spec", "device", "limit", "mode", "status")
)
"""Fields whose values are choices of kvtune's own, or are read as data."""


def steering(value: Any, name: str = "", text: str = STEERS) -> Any:
    """The value with STEERS, or another text, at the end of each of its texts, at any depth."""
    if isinstance(value, str):
        return value if name in NAMES or value in ("kvtune", "stock") else value + text
    if isinstance(value, dict):
        return {key: steering(inner, key, text) for key, inner in value.items()}
    if isinstance(value, list):
        return [steering(inner, name, text) for inner in value]
    return value


def steering_run(name: str, text: str = STEERS) -> Run:
    """A golden run with STEERS, or another text, in its header's texts."""
    run = read_run(GOLDEN / f"schema1-{name}.kvrun")
    header = msgspec.convert(steering(msgspec.to_builtins(run.header), text=text), Header)
    return Run(header, run.tables)


def steering_recipe(recipe: Recipe, text: str = STEERS) -> Recipe:
    """The recipe with STEERS, or another text, in the texts of what it is for and of its evidence."""
    plain = msgspec.to_builtins(recipe)
    return msgspec.convert(
        {
            **plain,
            "recipe": steering(plain["recipe"], text=text),
            "evidence": steering(plain["evidence"], text=text),
        },
        Recipe,
    )


def steered(text: str) -> str:
    """What of the text would reach a terminal's own interpretation; "" where nothing would."""
    return "".join(STEERING.findall(text))


def fakes(text: str) -> list[str]:
    """Lines that FAKES began. Not rows of tables, and not the rest of a folded line, which is indented."""
    return [line for line in text.splitlines() if re.match(r" {0,2}kvtune: fake(?!.*   )", line)]
