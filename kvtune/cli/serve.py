"""`kvtune serve MODEL`: becomes `vllm serve` with a core, its settings, a recipe and counters."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvtune.cli import completion, options


def serve(
    ctx: typer.Context,
    model: options.Model,
    recipe: options.Recipe = "",
    core: Annotated[
        str,
        typer.Option(
            "--core",
            help="KV core: kvtune or stock. Default: the recipe's, else kvtune.",
            autocompletion=completion.cores,
        ),
    ] = "",
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="A core setting, core.NAME=VALUE; may be repeated. Overrides the recipe's.",
            autocompletion=completion.core_knobs,
        ),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(
            help="Record traffic to this new trace file: lengths, times, salted hashes; no text, no tokens."
        ),
    ] = None,
    dummy: options.Dummy = False,
    anyway: options.Anyway = False,
) -> int:
    """Serve MODEL with vLLM's OpenAI server. vLLM's own flags (--port, ..) go after `--`."""
    import os
    import sys

    from kvtune import children
    from kvtune.cli.app import engine_args
    from kvtune.cli.settings import core_choice, core_settings
    from kvtune.engine.resolve import check_engine
    from kvtune.tune.recipes.serving import serving
    from kvtune.tune.recipes.shelf import find

    check_engine()
    made = serving(
        model,
        find(recipe) if recipe else None,
        record,
        engine_args(ctx),
        os.environ,
        core=core_choice(core) if core else None,
        core_settings=core_settings(set_ or []),
        anyway=anyway,
        dummy=dummy,
    )
    for note in made.notes:
        print(f"recipe: {note}", file=sys.stderr)
    children.become(made.command, made.environment)
