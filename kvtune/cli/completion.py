"""Completions for the Tab key: models, workloads and their keys, knobs, recipes, run files. Typer calls these.

bash cuts words at `:` and `=` before it asks and puts the answer after the cut. So `answer_bash` joins the words of
`rounds:prefixes=4` again, and removes from each answer the part before the cut.
"""

from __future__ import annotations

import contextlib
import io
import os
import shlex
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

VARIABLE = "_KVTUNE_COMPLETE"
"""The environment variable with which a shell asks for completions. Typer makes its name from the program's."""
BREAKS = ":="
MOST_FILES = 2_000

Offer = list[tuple[str, str]]
"""Pairs of a value and a line of help, which zsh and fish show."""


def asked() -> bool:
    return VARIABLE in os.environ


def models(incomplete: str) -> Offer:
    from kvtune.engine.models import SHAPES, TINY

    found = [(name, "built-in, runs anywhere") for name in TINY]
    found += [(name, "built-in shape, for a GPU or --on sim") for name in SHAPES]
    return found + [(name, "a folder with config.json") for name in _model_folders(incomplete)]


def _model_folders(incomplete: str) -> Iterable[str]:
    from pathlib import Path

    typed = Path(incomplete.rpartition("/")[0] + "/" if "/" in incomplete else ".")
    found = typed.glob("*/config.json") if typed.is_dir() else ()
    return sorted(str(path.parent) for path in found)


def workloads(incomplete: str) -> Offer:
    """Complete names; after the colon, the keys that are not given yet and the values of keys with choices."""
    from kvtune.workload.registry import WORKLOADS

    name, colon, rest = incomplete.partition(":")
    if not colon:
        names = [(kind.name, kind.help) for kind in WORKLOADS.values() if kind.name != "trace"]
        return names + [(f"{kind.name}:", "with keys") for kind in WORKLOADS.values()]
    if name not in WORKLOADS:
        return []
    head, _, last = rest.rpartition(",")
    before = f"{name}:{head}," if head else f"{name}:"
    key, equals, _ = last.partition("=")
    keys = {k.name: k for k in WORKLOADS[name].keys}
    if equals:
        return [(f"{before}{key}={choice}", "") for choice in (keys[key].choices if key in keys else ())]
    given = {pair.partition("=")[0] for pair in head.split(",")}
    offered = []
    for known in (k for k in keys.values() if k.name not in given):
        offered.append((f"{before}{known.name}=", known.help))
        if known.default != "":
            offered.append((f"{before}{known.name}={known.default}", "the default"))
    return offered


def core_knobs(incomplete: str) -> Offer:
    """Complete `profile --set`: core.NAME=VALUE."""
    from kvtune.knobs import CORE

    name, equals, _ = incomplete.partition("=")
    if equals:
        knob = CORE.get(name.removeprefix("core."))
        values = ("true", "false") if knob and knob.kind == "switch" else knob.choices if knob else ()
        return [(f"{name}={value}", "") for value in values or ([str(knob.default)] if knob else [])]
    return _assignments([(f"core.{name}", knob.help) for name, knob in CORE.items()])


def swept_knobs(incomplete: str) -> Offer:
    """Complete `sweep --set`: KNOB=V1,V2,.. of the core and of vLLM."""
    from kvtune.knobs import SEARCHED

    name, equals, given = incomplete.partition("=")
    if not equals:
        return _assignments([(n, knob.help) for n, knob in SEARCHED.items()])
    knob = SEARCHED.get(name)
    values = ("true", "false") if knob and knob.kind == "switch" else knob.choices if knob else ()
    return [(f"{name}={offered}", help) for offered, help in _listed(values)(given)]


def _assignments(names: Iterable[tuple[str, str]]) -> Offer:
    return [(f"{name}=", help) for name, help in names]


def _listed(values: Sequence[str]) -> Callable[[str], Offer]:
    """Return a function that completes the last of several values separated by commas."""

    def offer(incomplete: str) -> Offer:
        head, comma, _ = incomplete.rpartition(",")
        given = head.split(",")
        return [(f"{head}{comma}{value}", "") for value in values if value not in given]

    return offer


def devices(incomplete: str) -> Offer:
    """Complete `--like-device`."""
    from kvtune.vllm.platforms import DEVICES

    return [(name, "") for name in DEVICES]


objectives = _listed(("hit-rate", "ttft", "throughput", "goodput", "ceiling"))


def front_end_knobs(incomplete: str) -> Offer:
    """Complete `tune --knobs`."""
    from kvtune.knobs import of_front_end

    return _listed(of_front_end())(incomplete)


def switches(incomplete: str) -> Offer:
    """Complete `profile --ablate-only`."""
    from kvtune.knobs import CORE

    names = [name for name, knob in CORE.items() if knob.kind == "switch"]
    return _listed((*names, "thresholds"))(incomplete)


def recipes(incomplete: str) -> Offer:
    from kvtune.tune.recipes.shelf import named

    names = sorted(path.stem for path in named() if path.stem.isprintable())
    files = [(name, "a file") for name in _files(incomplete, ".toml")] if "/" in incomplete else []
    return [(name, "") for name in dict.fromkeys(names)] + files


def runs(incomplete: str) -> Offer:
    """Complete `last`, and run files below the output folder and in the folder that is being typed."""
    from kvtune.run.file import SUFFIX

    return [("last", "the newest run"), *((name, "") for name in _files(incomplete, SUFFIX))]


def runs_and_studies(incomplete: str) -> Offer:
    return [*runs(incomplete), *((name, "a study's journal") for name in _files(incomplete, ".jsonl"))]


def _files(incomplete: str, suffix: str) -> list[str]:
    from pathlib import Path

    from kvtune.run.config import output_folder

    typed = Path(incomplete.rpartition("/")[0] + "/" if "/" in incomplete else ".")
    beside = list(typed.glob(f"*{suffix}")) if typed.is_dir() else []
    found = [*beside, *_below(output_folder(), suffix), *(_below(typed, suffix) if "/" in incomplete else ())]
    return [name for path in dict.fromkeys(sorted(found)) if (name := str(path)).isprintable()]


def _below(folder: Path, suffix: str) -> Iterable[Path]:
    from itertools import islice

    found = (p for p in folder.rglob(f"*{suffix}") if not any(part.startswith(".") for part in p.parts))
    return islice(found, MOST_FILES)


def answer_bash(complete: Callable[[], object]) -> None:
    """Run typer's completion on joined words, and print the part of each answer after the cut."""
    words, at, cut = joined(os.environ["COMP_WORDS"].split("\n"), int(os.environ["COMP_CWORD"]))
    os.environ["COMP_WORDS"] = "\n".join(shlex.quote(word) for word in words)
    os.environ["COMP_CWORD"] = str(at)
    answer = io.StringIO()
    try:
        with contextlib.redirect_stdout(answer):
            complete()
    finally:
        lines = [line[cut:] for line in answer.getvalue().splitlines()]
        if len(lines) == 1 and lines[0].endswith(tuple(BREAKS)):
            lines.append(f"{lines[0]}..")  # a second answer, so that bash adds no space before the value
        print("\n".join(lines))


def joined(words: Sequence[str], at: int) -> tuple[list[str], int, int]:
    """Return the words as typed, the index of the current one, and how many of its characters precede bash's cut.

    bash passes `:` and `=` as separate words; kvtune has no such arguments, so each is joined to its neighbours.
    """
    made: list[str] = []
    current = cut = 0
    glued = False
    for number, word in enumerate(words):
        is_break = bool(word) and not word.strip(BREAKS)
        if made and (glued or is_break):
            before = len(made[-1]) + (len(word) if is_break else 0)
            made[-1] += word
        else:
            before = 0
            made.append(word)
        if number == at:
            current, cut = len(made) - 1, before
        glued = is_break
    return made, current, cut
