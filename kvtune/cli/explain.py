"""`kvtune explain`: which prompt tokens of a run were hits, why the others missed, and which setting helps."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from kvtune.cli import options


def explain(
    run: options.RunFile,
    tries: Annotated[
        int, typer.Option("--tries", min=0, help="Most remedies to replay for the largest causes; 0: none.")
    ] = 4,
    save: Annotated[
        bool,
        typer.Option(
            "--save", help="Store the causes in the run file, so that its summary and page show them."
        ),
    ] = False,
    json: options.Json = False,
) -> int:
    """Count every prompt token of RUN as a hit or under one cause of miss, by an exact replay."""
    from kvtune.cli.views.plan import announce
    from kvtune.explain.explanation import explain as explain_run
    from kvtune.explain.explanation import with_misses
    from kvtune.explain.text import ConsoleView
    from kvtune.run.file import read_run
    from kvtune.units import count

    recorded = read_run(run)
    replays = f"up to {tries + 1} replays" if tries else "1 replay"
    announce(
        f"{replays} of {count(recorded.header.workload.requests)} requests without a model, no engine start"
    )
    explanation = explain_run(recorded, tries=tries, view=ConsoleView())
    if json:
        from kvtune.explain.text import to_json

        options.print_json(to_json(explanation))
    else:
        from kvtune.explain.text import WIDTH, lines
        from kvtune.terminal import width

        for line in lines(explanation, min(WIDTH, width(WIDTH))):
            print(line)
    if save:
        from kvtune.run.file import write_run

        write_run(with_misses(recorded, explanation), run)
        print(f"stored the causes in {run}", file=sys.stderr)
    return 0
