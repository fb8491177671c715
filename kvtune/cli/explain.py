"""`kvtune explain`: where every prompt token of a run went, and which setting would have made it a hit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def explain(
    run: Annotated[Path, typer.Argument(help="A run file (.kvrun), of the engine or of the simulator.")],
    tries: Annotated[
        int, typer.Option("--tries", min=0, help="Remedies to replay for the largest causes; 0: none.")
    ] = 4,
    save: Annotated[
        bool, typer.Option("--save", help="Store the causes in the run file: summary and page show them.")
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on stdout, nothing else.")
    ] = False,
) -> int:
    """Count every prompt token of RUN as a hit or under one cause of miss, by an exact replay."""
    from kvtune.explain.explanation import explain as explain_run
    from kvtune.explain.explanation import with_misses
    from kvtune.explain.text import ConsoleView
    from kvtune.run.file import read_run

    recorded = read_run(run)
    found = explain_run(recorded, tries=tries, view=ConsoleView())
    if json:
        import msgspec

        from kvtune.explain.text import to_json

        print(msgspec.json.encode(to_json(found)).decode())
    else:
        from kvtune.explain.text import lines

        for line in lines(found):
            print(line)
    if save:
        from kvtune.run.file import write_run

        write_run(with_misses(recorded, found), run)
        print(f"stored the causes in {run}", file=sys.stderr)
    return 0
