"""`kvtune doctor`: checks this machine, and which of a model's settings do nothing or harm."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvtune.cli import completion, options
from kvtune.errors import UsageError
from kvtune.run.config import OUTPUT_VARIABLE, REPORTS


def doctor(
    ctx: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            help="A built-in model, a folder with config.json, or a name on the hub. Needs no weights.",
            autocompletion=completion.models,
        ),
    ] = None,
    workload: Annotated[
        str,
        typer.Option(
            "-w",
            "--workload",
            help="Weigh the block layouts of a model with recurrent states for this workload.",
            autocompletion=completion.workloads,
        ),
    ] = "",
    fail_on: Annotated[
        str, typer.Option("--fail-on", help="Exit 1 from this level on: note, warning or error.")
    ] = "error",
    output: Annotated[
        Path,
        typer.Option(
            "-o",
            "--output",
            envvar=OUTPUT_VARIABLE,
            help="Folder whose free space and permissions are checked.",
        ),
    ] = REPORTS,
    vllm: Annotated[
        bool,
        typer.Option(
            "--vllm",
            help="Ask vLLM about MODEL, and replay when a shared prefix hits. Without it arithmetic answers where it "
            "can: for a family that it knows, without -w and flags.",
        ),
    ] = False,
    host: Annotated[
        bool | None,
        typer.Option(
            "--host/--no-host",
            help="Measure how many tokens a second this host can drive at most: vLLM's processes for some seconds, "
            "without a model. By default where there is a GPU.",
        ),
    ] = None,
    like_device: options.LikeDevice = "",
    json: options.Json = False,
) -> int:
    """Check this machine and, if named, MODEL under vLLM's own flags (after `--`). Needs no weights."""
    from kvtune.cli.app import engine_args
    from kvtune.cli.views.plan import begin
    from kvtune.doctor.diagnosis import examine
    from kvtune.doctor.finding import LEVELS
    from kvtune.engine.nvidia import gpus
    from kvtune.engine.resolve import tokenizer_of
    from kvtune.workload.spec import build

    level = options.choice("--fail-on", fail_on, [known for known in LEVELS if known != "ok"])
    flags = engine_args(ctx)
    if flags and model is None:
        raise UsageError(f"vLLM's flags ({flags[0]} ..) need a model", "kvtune doctor MODEL -- FLAGS")
    if workload and model is None:
        raise UsageError("-w needs a model", "kvtune doctor MODEL -w WORKLOAD")
    like = options.like_device(like_device, on="sim")
    if vllm and model is None:
        raise UsageError("--vllm needs a model", "kvtune doctor MODEL --vllm")
    if like and model is None:
        raise UsageError(f"--like-device {like} needs a model", "kvtune doctor MODEL --like-device DEVICE")
    measured = bool(gpus()) if host is None else host
    if measured:
        begin("measuring how much this host can drive, without a model; --no-host leaves it out")
    begin(f"reading this machine{f' and what {model} comes to' if model else ''}")
    weighed = build(workload, tokenizer=tokenizer_of(model, flags)) if workload and model else None
    diagnosis = examine(model, flags, output, weighed, measure_host=measured, like=like, ask=vllm)
    if json:
        options.print_json(diagnosis.to_json())
    else:
        from rich.text import Text

        from kvtune.doctor.text import WIDTH, lines
        from kvtune.terminal import console, width

        styles = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "bold red"}
        out = console()
        for mark, text in lines(diagnosis, min(WIDTH, width(WIDTH))):
            out.print(Text(text, style=styles.get(mark or "", "")), soft_wrap=True)
    return diagnosis.exit_code(level)
