"""Commands that are printed can be copied: a shell takes each word as it is."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest

import kvtune
from kvtune.base.commands import command, core_words


def test_a_shell_takes_each_word_as_it_is() -> None:
    words = ["profile", "my model", "-w", "rounds:prefixes=2"]
    flags = ["--hf-overrides", '{"a": 1}', "$(reboot)"]
    assert shlex.split(command(*words, flags=flags)) == ["kvtune", *words, "--", *flags]
    assert command("doctor", flags=[]) == "kvtune doctor"


def test_settings_of_the_core_keep_every_digit() -> None:
    settings = {"slack": 4_194_304, "reuse_bonus_s": 0.123456789, "packed": True}
    assert core_words(settings) == [
        *("--set", "core.slack=4194304", "--set", "core.reuse_bonus_s=0.123456789"),
        *("--set", "core.packed=true"),
    ]


ROOT = Path(kvtune.__file__).parents[1]
DATA = {
    "kvtune/reading/report/names.py": "the command line that a run file names, shown as data",
    "kvtune/answers/tune/document.py": "a study's flags, shown as data",
    "kvtune/reading/report/recipe.py": "a recipe's flags, shown as data",
    "kvtune/answers/explain/document.py": "the name of the command that answers, above its answer",
    "kvtune/cli/options.py": "what --trust lets a file do, printed before it does",
    "kvtune/answers/tune/recipes/shelf.py": "env.sh of `recipe export`",
}
"""Modules that join or quote words, but print no command to be copied."""
SUBCOMMANDS = sorted(path.stem.replace("_", "-") for path in (ROOT / "kvtune/cli").glob("*.py"))
ASSEMBLED = re.compile(rf"\b(kvtune ({'|'.join(SUBCOMMANDS)})|vllm serve)\b[^`]*\x00")


def assembled(source: str) -> list[int]:
    """The lines on which a command is put together from text and values, without kvtune/base/commands.py."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            parts = [str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values]
            found += [node.lineno] if ASSEMBLED.search("".join(parts)) else []
        elif isinstance(node, ast.Attribute) and node.attr in ("join", "quote"):
            found += [node.lineno] if ast.unparse(node.value) == "shlex" else []
        elif isinstance(node, ast.ImportFrom) and node.module == "shlex":
            found.append(node.lineno)
    return found


def gives_flags(source: str) -> list[int]:
    """The lines on which `command` gets flags that no list has read."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and "kvtune.base.commands" in source
        and ast.unparse(node.func).rpartition(".")[2] == "command"
        and any(keyword.arg in ("flags", None) for keyword in node.keywords)
    ]


@pytest.mark.lint
def test_no_other_module_puts_a_command_together() -> None:
    modules = {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "kvtune").rglob("*.py")}
    found = {name for name, source in modules.items() if assembled(source)}
    assert found == {"kvtune/base/commands.py", *DATA}
    flags = {name for name, source in modules.items() if gives_flags(source)}
    assert flags == {"kvtune/reading/analysis/again.py"}, (
        "vLLM's flags of a file pass the list first: `with_flags`"
    )
