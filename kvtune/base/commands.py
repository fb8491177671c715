"""Commands that kvtune prints to be copied. Every word is quoted, so that a shell takes it as it is."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence

VERIFY = "Check it on this machine: run its evidence again"


def command(*words: str, flags: Iterable[str] = ()) -> str:
    """Return the command `kvtune` with these words, and vLLM's `flags` after `--`."""
    after = list(flags)
    return shlex.join(["kvtune", *words, *(["--", *after] if after else [])])


def quoted(words: Iterable[str]) -> str:
    """Return a part of a command, such as an option to add."""
    return shlex.join(words)


def model_word(model: str) -> str:
    """Return a model's name from a file as one word of a command, which no command line takes for an option."""
    return "MODEL" if not model or model.startswith("-") else model


def vllm_serve(model: str, flags: Iterable[str] = ()) -> str:
    """Return the command that serves a model with plain vLLM. `flags` of a file pass the list first."""
    return shlex.join(["vllm", "serve", model_word(model), *flags])


def exported_serve(core: str, *, shape: bool) -> str:
    """Return the command that serves with plain vLLM what `kvtune recipe export -o served` wrote.

    Its config.yaml names the model, except for a built-in `shape`, whose weights are elsewhere.
    """
    words = [*(["MODEL"] if shape else []), "--config", "served/config.yaml"]
    environment = "" if core == "stock" else "source served/env.sh && "
    return environment + shlex.join(["vllm", "serve", *words])


def in_turns(commands: Sequence[str], folders: Sequence[str], *more: str) -> str:
    """Return the line that runs each command three times, in turns, and then compares their folders."""
    files = " ".join(f"{shlex.quote(folder)}/*.kvrun" for folder in folders)
    compared = shlex.join(["kvtune", "compare", *more])
    return f"for run in 1 2 3; do {'; '.join(commands)}; done; {compared} {files}"


def core_words(settings: Mapping[str, object]) -> list[str]:
    """Return `--set core.NAME=VALUE` for each setting, with every digit of a number."""
    values = {
        name: str(value).lower() if isinstance(value, bool) else value for name, value in settings.items()
    }
    return [word for name, value in values.items() for word in ("--set", f"core.{name}={value}")]


def recipe_commands(model: str, name: str, load: Iterable[str]) -> dict[str, str]:
    """Return the commands that use a recipe, each under a title. `load`: the words that name a load."""
    return {
        "Serve with it": command("serve", model_word(model), "--recipe", name),
        "Run a load with it": command("profile", model_word(model), "--recipe", name, *load),
        VERIFY: command("recipe", "verify", name),
        "For plain vLLM: its configuration, and the environment that kvtune's core needs": command(
            "recipe", "export", name, "-o", "served"
        ),
    }
