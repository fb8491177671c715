"""vLLM's flags on a command line, by name. Plain text: vLLM's own parser is asked in the doctor's child process."""

from __future__ import annotations

from collections.abc import Sequence


def given(engine_args: Sequence[str]) -> dict[str, str]:
    """Flag name, without its dashes -> value; a switch has the value ""."""
    flags: dict[str, str] = {}
    name = ""
    for argument in engine_args:
        if argument.startswith("--"):
            name, _, value = argument[2:].partition("=")
            name = name.replace("_", "-")
            flags[name] = value
        elif name:
            flags[name] = f"{flags[name]} {argument}".strip()
    return flags
