"""`kvtune demo`: a miss, the text that caused it, the mend and its gain, from shipped files; no server, no engine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from kvtune.base.commands import command
from kvtune.base.errors import UsageError
from kvtune.base.extras import EXTRAS
from kvtune.cli.query import Lab, Query, argument

SHIPPED = Path(__file__).parent / "demo_files"
LOG, RUN, LINES = "agent.jsonl", "agent.kvrun", "tap.txt"
"""What a tap wrote and printed before a real vLLM server; a replay of the log on vLLM's scheduler."""


@dataclass(frozen=True, kw_only=True)
class DemoQuery(Query):
    folder: Path = argument(Path("kvtune-demo"), "FOLDER")("""A new folder for the files that the commands
        read.""")


def demo(query: DemoQuery, lab: Lab) -> int:
    """Show in 20 seconds what kvtune does: a miss, its text, the mend, the gain. Needs no server, engine or network."""
    from kvtune.base.files import explained, read_regular, replacing
    from kvtune.cli.explain_log import ExplainLogQuery, explain_log

    folder = query.folder
    if os.path.lexists(folder):
        raise UsageError(f"{folder} exists", f"name a new folder: {command('demo', 'FOLDER')}")
    with explained(folder, "name a folder that can be made"):
        folder.mkdir()
        for name in (LOG, RUN):
            with replacing(folder / name) as file:
                file.write(read_regular(SHIPPED / name, 1 << 22))
    log, mended, page = (str(folder / name) for name in (LOG, "mended.jsonl", "agent.html"))
    print(
        "An agent reads files, searches and runs tests, in two tasks. Its system prompt begins with the time.\n"
    )
    print("1. Why do its requests miss? A relay before the server says it of each. (This was recorded.)\n")
    print(f"$ {command('tap', 'http://localhost:8000', '--with-text', '-o', log)}")
    print(read_regular(SHIPPED / LINES, 1 << 20).decode().rstrip())
    _step(
        "2. Which text is it, and how is the prompt mended? By its text alone, so counts are bytes.",
        "explain-log",
        log,
        "--text-only",
        "--mended",
        mended,
    )
    explain_log(ExplainLogQuery(log=log, text_only=True, mended=Path(mended)), lab)
    _step(
        "3. Does that help? The same requests, with the time after what they share.",
        "explain-log",
        mended,
        "--text-only",
    )
    explain_log(ExplainLogQuery(log=mended, text_only=True), lab)
    _step(
        "4. A page to send on, of the log's replay in tokens, through vLLM's own scheduler.",
        "report",
        str(folder / RUN),
        "-o",
        page,
    )
    if all(find_spec(module) for module in EXTRAS["report"]):
        from kvtune.cli.report import ReportQuery, report

        report(ReportQuery(runs=[folder / RUN], output=Path(page)))
    else:
        print("(not drawn: pages need `pip install 'kvtune[report]'`)")
    print(
        f"\nYour own server: {command('watch', 'http://localhost:8000')}, then {command('tap', 'http://localhost:8000')}."
    )
    return 0


def _step(title: str, *words: str) -> None:
    print(f"\n{title}\n\n$ {command(*words)}", flush=True)
