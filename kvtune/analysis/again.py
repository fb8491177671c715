"""The `kvtune` commands that repeat a run or use a study, to be copied. Pure.

A file names models, loads and flags, so a command that is made from a file carries flags of the list alone
(kvtune/engine/recorded.py), written anew; `left_out` names the others. A model and a load are data, one word each.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from kvtune.commands import command, core_words, model_word
from kvtune.core.settings import of_an_old_run
from kvtune.engine.flags import with_flag
from kvtune.engine.recorded import on_the_list
from kvtune.run.extras import Remedy, Scalar
from kvtune.run.types import Run
from kvtune.terminal import one_line

KEPT = {
    "--like": r"[^-].*",
    "--like-device": r"\w[\w.]*",
    "--step-us": r"\d[\w.+-]*",
    "--mode": r"exact|jump",
    "--slo": r"\w+=[\d.]+(,\w+=[\d.]+)*",
    "--dummy": "",
}
"""Options of `profile` that describe the run itself, each with the form of its value; "" if it takes none."""

MOST_LEFT_OUT = 6
"""Flags that `left_out` names; it counts the rest."""


def with_flags(words: Sequence[str], flags: Sequence[str]) -> str:
    """Return a command with those of a file's vLLM flags that are on the list. Say `left_out` beside it."""
    return command(*words, flags=on_the_list(flags)[0])


def left_out(flags: Sequence[str]) -> str:
    """Return the sentence that names a file's flags that no command repeats; "" if there are none."""
    names = on_the_list(flags)[1]
    if not names:
        return ""
    shown = [ascii(one_line(name))[1:-1] for name in names[:MOST_LEFT_OUT]]
    more = len(names) - len(shown)
    text = f"{', '.join(shown)}{f' and {more} more' if more else ''}"
    return f"without {text}, which the file asks for: add what you trust"


def left_out_of_run(run: Run) -> str:
    """Return `left_out` for all commands that are made from this run."""
    told = run.header.extra.replayed
    changed = [
        word
        for remedy in (told.remedies if told else ())
        for name, value in remedy.flags.items()
        if value is not None
        for word in with_flag((), name, value)
    ]
    return left_out([*run.header.engine.args, *changed])


def profile_line(
    run: Run,
    *options: str,
    core: str = "",
    core_settings: Mapping[str, Scalar] | None = None,
    flags: Mapping[str, str | None] | None = None,
) -> str:
    """Return the `kvtune profile` command for the run's model and load. The arguments replace the run's settings."""
    header = run.header
    core = core or header.core.name
    settings = of_an_old_run(header.core.settings) if core_settings is None else core_settings
    words = ["profile", model_word(header.model), *_place(run), *workload_words(run)]
    if core != "kvtune" or core != header.core.name:
        words += ["--core", core]
    if core == "kvtune":
        words += core_words(settings)
    args = list(header.engine.args)
    for name, flag in (flags or {}).items():
        args = with_flag(args, name, flag)
    return with_flags([*words, *options], args)


def repeating(run: Run) -> str:
    """Return the command that makes the run again; "" for a server's recording, which no load can repeat."""
    return "" if run.header.source == "server" else profile_line(run)


def with_remedy(run: Run, remedy: Remedy) -> str:
    """Return the command that measures a remedy."""
    return profile_line(run, core=remedy.core, core_settings=remedy.core_settings, flags=remedy.flags)


def workload_words(run: Run) -> list[str]:
    load = run.header.workload
    return ["-w", load.spec, *(["--seed", str(load.seed)] if load.seed else [])]


def _place(run: Run) -> Iterator[str]:
    """Yield `--on` and the options in KEPT as the run had them."""
    if run.header.source != "engine":
        yield from ("--on", run.header.source)
    words = run.header.command
    words = words[: words.index("--")] if "--" in words else words
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name not in KEPT:
            continue
        if not KEPT[name]:
            yield name
        elif re.fullmatch(KEPT[name], value if equals else "".join(words[at + 1 : at + 2])):
            yield from (word,) if equals else words[at : at + 2]


def profile_again(run: Run, output: str) -> str:
    """Return the `kvtune profile` command that repeats the run into a folder; "" if another command made the run."""
    return profile_line(run, "-o", output) if run.header.command[1:2] == ["profile"] else ""
