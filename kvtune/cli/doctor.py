"""`kvtune doctor`: what is installed, what a model's settings come to, what is inert or hurts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvtune.errors import UsageError


def doctor(
    ctx: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(help="A built-in model, a folder with config.json, or a hub name. Needs no weights."),
    ] = None,
    workload: Annotated[
        str,
        typer.Option("-w", "--workload", help="Weigh the layouts of a model with states by its prefixes."),
    ] = "",
    fail_on: Annotated[
        str, typer.Option("--fail-on", help="Exit with 1 from this level on: note, warning or error.")
    ] = "error",
    output: Annotated[Path, typer.Option("-o", "--output", help="Where runs would be written.")] = Path(
        "reports"
    ),
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on stdout, and nothing else.")
    ] = False,
) -> int:
    """Examine this machine and, where named, MODEL under vLLM's own flags (after `--`). No engine, no weights."""
    from kvtune.cli.app import engine_args
    from kvtune.doctor.diagnosis import examine
    from kvtune.doctor.finding import LEVELS
    from kvtune.workload.spec import build

    level = next((known for known in LEVELS if known == fail_on and known != "ok"), None)
    if level is None:
        raise UsageError(f"--fail-on {fail_on} is no level", "give note, warning or error")
    flags = engine_args(ctx)
    if flags and model is None:
        raise UsageError(
            f"vLLM's flags ({flags[0]} ..) stand without a model", "kvtune doctor MODEL -- FLAGS"
        )
    if workload and model is None:
        raise UsageError("-w stands without a model", "kvtune doctor MODEL -w WORKLOAD")
    diagnosis = examine(model, flags, output, build(workload) if workload else None)
    if json:
        import msgspec

        print(msgspec.json.encode(diagnosis.to_json()).decode())
    else:
        from rich.console import Console
        from rich.text import Text

        from kvtune.doctor.text import lines

        styles = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "bold red"}
        console = Console(soft_wrap=True, highlight=False)
        for mark, text in lines(diagnosis):
            console.print(Text(text, style=styles.get(mark or "", "")))
    return diagnosis.exit_code(level)
