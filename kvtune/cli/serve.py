"""`kvtune serve MODEL`: becomes `vllm serve` with a recipe's settings, the core, and counters on /metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def serve(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(help="What `vllm serve` takes, or a built-in tiny model.")],
    recipe: Annotated[str, typer.Option(help="A recipe: a file, or a name of `kvtune recipe list`.")] = "",
    record: Annotated[
        Path | None,
        typer.Option(help="Record traffic as a trace: lengths, times, salted hashes; no text, no tokens."),
    ] = None,
    dummy: Annotated[bool, typer.Option("--dummy", help="Random weights on the real config.")] = False,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Use a recipe of another model, version or device.")
    ] = False,
) -> int:
    """Serve MODEL with vLLM's OpenAI server. vLLM's own flags (--port, ..) stand after `--`."""
    import os

    from kvtune.cli.app import engine_args
    from kvtune.tune.recipes.serving import serving
    from kvtune.tune.recipes.shelf import find

    made = serving(
        model,
        find(recipe) if recipe else None,
        record,
        engine_args(ctx),
        os.environ,
        anyway=anyway,
        dummy=dummy,
    )
    os.execve(made.command[0], made.command, made.environment)
