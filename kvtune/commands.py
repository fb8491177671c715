"""Commands that kvtune prints to be copied. Every word is quoted, so that a shell takes it as it is."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping

VERIFY = "Check it on this machine: run its evidence again"


def command(*words: str, flags: Iterable[str] = ()) -> str:
    """Return the command `kvtune` with these words, and vLLM's `flags` after `--`."""
    after = list(flags)
    return shlex.join(["kvtune", *words, *(["--", *after] if after else [])])


def core_words(settings: Mapping[str, object]) -> list[str]:
    """Return `--set core.NAME=VALUE` for each setting, with every digit of a number."""
    values = {
        name: str(value).lower() if isinstance(value, bool) else value for name, value in settings.items()
    }
    return [word for name, value in values.items() for word in ("--set", f"core.{name}={value}")]


def recipe_commands(model: str, name: str, load: str) -> dict[str, str]:
    """Return the commands that use a recipe, each under a title."""
    return {
        "Serve with it": command("serve", model, "--recipe", name),
        "Run a load with it": command("profile", model, "--recipe", name, "-w", load),
        VERIFY: command("recipe", "verify", name),
        "For plain vLLM: a configuration and its environment": command(
            "recipe", "export", name, "-o", "served"
        ),
    }
