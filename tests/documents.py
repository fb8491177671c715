"""What the documents say about the code, taken apart: command lines, paths, links, make targets, variables."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import typer

from kvtune.base.errors import KvtuneError
from kvtune.cli.app import build_app
from kvtune.requests.loads.spec import build

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "kvtune"
FIRST = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md")
DOCUMENTS = sorted(
    {
        *(ROOT / name for name in (*FIRST, "bench/README.md", "recipes/README.md")),
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "reports" / "evidence").glob("*.md"),
        *(ROOT / "reports").glob("**/README.md"),
    }
)
FENCE = re.compile(r"^```.*?\n(.*?)^```", re.S | re.M)
SPAN = re.compile(r"`([^`\n]+)`")
PATH = re.compile(r"(?<![\w/.<*-])(?:kvtune|tests|docs|recipes|reports|\.ci|\.github)/[\w./-]*\w/?")
PYTHON = re.compile(r"(?<![\w/.<>*-])[\w/-]+\.py\b")
LINK = re.compile(r"\]\(([^)\s]+)\)")
VARIABLE = re.compile(r"KVTUNE_[A-Z0-9_]+")


def blocks(text: str) -> Iterator[str]:
    """The lines of fenced blocks, with continued lines joined and prompts cut off."""
    for block in FENCE.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            yield line.strip().removeprefix("$ ")


def spans(text: str) -> list[str]:
    """Inline code outside of fenced blocks."""
    return [span.replace("\\|", "|") for span in SPAN.findall(FENCE.sub("", text))]


def complaint(line: str) -> str:
    """Why the app would refuse this command line (`kvtune ..`); empty when it takes it."""
    words = shlex.split(line, comments=True)[1:]
    words = words[: words.index(">")] if ">" in words else words  # what follows is the shell's
    ours = words[: words.index("--")] if "--" in words else words
    flags = words[words.index("--") + 1 :] if "--" in words else []
    group: Any = typer.main.get_command(build_app())
    try:
        context = group.make_context("kvtune", list(ours), obj=flags)
        while hasattr(group, "resolve_command"):
            name, group, ours = group.resolve_command(context, ours)
            context = group.make_context(name, list(ours), parent=context)
            ours = context._protected_args + context.args if hasattr(group, "resolve_command") else []
        group.callback.query.from_cli(context, context.params)
    except Exception as error:
        message = error.format_message() if hasattr(error, "format_message") else str(error)
        return message or type(error).__name__
    return unbuildable(words)


def unbuildable(words: list[str]) -> str:
    """Why the workload that follows -w or --guard is none; empty for traces, logs and placeholders such as W."""
    for option, spec in pairwise(words):
        if (
            option in ("-w", "--workload", "--guard")
            and spec[:1].islower()
            and not spec.startswith(("trace:", "requests:"))
        ):
            try:
                build(spec)
            except KvtuneError as error:
                return error.message
    return ""


def unknown(span: str) -> str:
    """What of an inline `kvtune ..` is no command or no option of it; arguments may be missing here."""
    words = [word for word in span.split("--", 1)[0].split() if re.fullmatch(r"[a-z][a-z|-]*", word)][1:]
    options = re.findall(r"(?<![\w-])--?[a-z][\w-]*", span.split(" -- ")[0])
    group: Any = typer.main.get_command(build_app())
    known = {name for parameter in group.params for name in parameter.opts} | {"--help"}
    commands = [group]
    for word in words:
        if not all(hasattr(command, "commands") for command in commands):
            break
        missing = [name for name in word.split("|") if name not in commands[0].commands]
        if missing:
            return f"no command {missing[0]}"
        commands = [commands[0].commands[name] for name in word.split("|")]
    known |= {name for command in commands for parameter in command.params for name in parameter.opts}
    return ", ".join(option for option in options if option not in known)


def missing_paths(text: str, folder: Path) -> list[str]:
    """Paths from the root, Python files by any tail of their path, and links, that lead nowhere."""
    files = [
        path.relative_to(ROOT)
        for top in (PACKAGE, ROOT / "tests", ROOT / "bench", ROOT / "docs")
        for path in top.rglob("*.py")
    ]
    tails = {"/".join(path.parts[i:]) for path in files for i in range(len(path.parts))}
    missing = [path for path in PATH.findall(text) if not (ROOT / path).exists() and path not in tails]
    missing += [path for path in PYTHON.findall(text) if path not in tails]
    for link in LINK.findall(text):
        path, _, anchor = link.partition("#")
        if "://" in link:
            continue
        target = folder / path if path else None
        if target is not None and not target.exists():
            missing.append(link)
            continue
        page = target.read_text(encoding="utf-8") if target and anchor else text
        if anchor and anchor not in anchors(page):
            missing.append(link)
    return sorted(set(missing))


def anchors(text: str) -> set[str]:
    """The names under which a page's headings can be linked to."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def variables_in_code() -> set[str]:
    """KVTUNE_* names that stand as strings in kvtune/, doctor's list of them left out."""
    names: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        listed = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "VARIABLES"
        ]
        inside = {id(node) for each in listed for node in ast.walk(each)}
        names |= {
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and VARIABLE.fullmatch(node.value)
            and id(node) not in inside
        }
    return names
