"""`kvtune runs [PATH]..`: lists the runs in the output folder or at PATHs; may delete them."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import typer

from kvtune.base.errors import UsageError
from kvtune.cli import options
from kvtune.cli.query import Query, When, argument, option


@dataclass(frozen=True, kw_only=True)
class RunsQuery(Query):
    paths: list[Path] | None = argument(None, "[PATHS]...", parser=options.run_path)("""Folders and run
        files. Default: the output folder.""")
    state: Literal["complete", "partial", "failed", "unreadable"] | None = option(None)("""Only these:
        complete, partial, failed or unreadable.""")
    delete: bool = option(False, When("for a list that is printed before it asks", json=False))("""Delete
        these runs with their pages and exports, after asking.""")
    yes: bool = option(False, When("the answer to the question of --delete", delete=True))("""Delete without
        asking.""")
    json: options.Json = False


def runs(query: RunsQuery) -> int:
    """List runs, the newest first: model, load, core, hits, first token, state. `last` names the newest anywhere."""
    from kvtune.base.errors import KvtuneError
    from kvtune.cli.views.answer import print_answer
    from kvtune.data.run.file import read_columns, read_label
    from kvtune.data.run.folder import belongings, newest_first, run_files
    from kvtune.data.run.output import output_folder
    from kvtune.reading.report.runs import COLUMNS, OF_LOOKS, ListedRun, Runs, document, listed

    places = query.paths or [output_folder()]
    for place in places if query.paths else ():
        if not place.exists():
            raise UsageError(f"there is no {place}", "give a folder or a run file")
    files = [file for place in places for file in ([place] if place.is_file() else run_files(place))]
    rows: list[ListedRun] = []
    names: list[str] = []
    for number, file in enumerate(newest_first(list(dict.fromkeys(files)))):
        page = file.with_suffix(".html")
        try:
            requests = read_columns(file, "requests", COLUMNS)
            looks = read_columns(file, "looks", OF_LOOKS)
            row = listed(read_label(file), requests, str(file), str(page) if page.exists() else "", looks)
        except KvtuneError as error:
            row = ListedRun(file=str(file), why=error.message)
        if not query.state or row.state == query.state:
            rows.append(row)
            names += [] if query.paths else [f"last~{number}" if number else "last"]
    answer = Runs(rows)
    shown = document(answer, names, query.state or "", ", ".join(map(str, places)))
    print_answer(answer, shown, json=query.json, rows=len(rows))
    if not rows or not query.delete:
        return 0
    doomed = [belongings(Path(row.file)) for row in rows]
    for row, files in zip(rows, doomed, strict=True):
        if not files:
            print(f"{row.file} stays: it is not a run file that this kvtune reads", file=sys.stderr)
    return _delete(list(filter(None, doomed)), asked=not query.yes)


def _delete(belonging: list[list[Path]], *, asked: bool) -> int:
    from kvtune.base.errors import KvtuneError
    from kvtune.base.units import size
    from kvtune.data.run.folder import delete

    runs, doomed = len(belonging), [path for files in belonging for path in files]
    if not runs:
        print("nothing deleted")
        return 0
    total = sum(path.lstat().st_size for path in doomed)
    what = f"{runs} run{'s' if runs > 1 else ''} with pages and exports: {len(doomed)} files, {size(total)}"
    if asked:
        if not sys.stdin.isatty():
            raise UsageError("--delete asks first, and there is no terminal to answer", "add --yes")
        if not typer.confirm(f"Delete {what}?"):
            print("nothing deleted")
            return 0
    if errors := delete(doomed):
        raise KvtuneError(
            f"cannot delete {errors[0]}",
            "the other runs are deleted; fix the cause and run the command again",
        )
    print(f"deleted {what}")
    return 0
