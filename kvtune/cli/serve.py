"""`kvtune serve MODEL`: becomes `vllm serve` with a core, its settings, a recipe and counters."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from kvtune.cli import options
from kvtune.cli.query import Flags, Query, When, option


@dataclass(frozen=True, kw_only=True)
class ServeQuery(Query):
    model: options.Model
    recipe: options.Recipe = ""
    core: options.RecipeCore = None
    set_: options.CoreSetting = None
    record: Path | None = option(None)("""Record traffic to this new trace file: lengths, times, salted
        hashes; no text, no tokens.""")
    dummy: options.Dummy = False
    anyway: Annotated[options.Anyway, When("for a recipe of something else", recipe=True)] = False
    flags: Flags = ()


def serve(query: ServeQuery) -> int:
    """Serve MODEL with vLLM's OpenAI server. vLLM's own flags (--port, ..) go after `--`."""
    import os
    import sys

    from kvtune.answers.tune.recipes.serving import serving
    from kvtune.answers.tune.recipes.shelf import find
    from kvtune.base import children
    from kvtune.cli.settings import core_settings
    from kvtune.lab.setup.resolve import check_engine

    check_engine()
    made = serving(
        query.model,
        find(query.recipe) if query.recipe else None,
        query.record,
        query.flags,
        os.environ,
        core=query.core if query.core else None,
        core_settings=core_settings(query.set_ or []),
        anyway=query.anyway,
        dummy=query.dummy,
    )
    for note in made.notes:
        print(f"recipe: {note}", file=sys.stderr)
    children.become(made.command, made.environment)
