"""The `kvtune` command that repeats a run, unchanged or with other settings. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from kvtune.commands import command, core_words
from kvtune.core.settings import of_an_old_run
from kvtune.engine.flags import with_flag
from kvtune.run.extras import Remedy, Scalar
from kvtune.run.types import Run

KEPT = {"--like": 1, "--like-device": 1, "--step-us": 1, "--mode": 1, "--dummy": 0}
"""Options of `profile` that describe the run itself, each with its number of values."""


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
    words = ["profile", header.model, *_place(run), *workload_words(run)]
    if core != "kvtune" or core != header.core.name:
        words += ["--core", core]
    if core == "kvtune":
        words += core_words(settings)
    args = list(header.engine.args)
    for name, flag in (flags or {}).items():
        args = with_flag(args, name, flag)
    return command(*words, *options, flags=args)


def with_remedy(run: Run, remedy: Remedy) -> str:
    """Return the command that measures a remedy."""
    return profile_line(run, core=remedy.core, core_settings=remedy.core_settings, flags=remedy.flags)


def workload_words(run: Run) -> list[str]:
    load = run.header.workload
    return ["-w", load.spec, *(["--seed", str(load.seed)] if load.seed else [])]


def _place(run: Run) -> list[str]:
    """Return `--on` and the options in KEPT as the run had them."""
    place = [] if run.header.source == "engine" else ["--on", run.header.source]
    words = run.header.command
    for at, word in enumerate(words[: words.index("--") if "--" in words else len(words)]):
        name, equals, _ = word.partition("=")
        if name in KEPT:
            place += words[at : at + 1 + (0 if equals else KEPT[name])]
    return place


OWN_OUTPUT = {"-o": 1, "--output": 1, "--repeat": 1, "--json": 0, "--open": 0, "-q": 0, "--quiet": 0}
"""Options of `profile` that say where results go or how often it runs, and how many values each takes."""


def profile_again(run: Run, output: str) -> str:
    """Return the run's own `kvtune profile` command with another output folder; "" if another command made the run."""
    words = iter(run.header.command[1:])
    kept: list[str] = []
    for word in words:
        if word == "--":
            break
        if word in OWN_OUTPUT:
            for _ in range(OWN_OUTPUT[word]):
                next(words, "")
        elif word.split("=")[0] not in OWN_OUTPUT:
            kept.append(word)
    return command(*kept, "-o", output, flags=words) if kept[:1] == ["profile"] else ""
