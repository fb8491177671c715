"""`kvtune record URL -o RUN`: records a running server to a run file for the other commands."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvtune.cli import options
from kvtune.commands import command
from kvtune.errors import KvtuneError, UsageError

if TYPE_CHECKING:
    from kvtune.run.types import Run


def record(
    url: options.Url,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="The run file to write; it must be new.", metavar="RUN")
    ],
    seconds: Annotated[
        float,
        typer.Option(
            "--seconds", min=1, help="How long; Ctrl-C ends it before and writes the file.", metavar="S"
        ),
    ] = 60.0,
    requests: options.RequestsLog = None,
    header: options.Header = None,
    insecure: options.Insecure = False,
) -> int:
    """Record a running vLLM server: hits, misses by cause, evictions. It sends no load and changes nothing."""
    from kvtune.run.file import write_run

    if os.path.lexists(output):
        raise UsageError(f"{output} exists", "name a new file")
    if not output.resolve().parent.is_dir():
        raise UsageError(
            f"there is no folder {output.resolve().parent}", "make it, or choose another file with -o"
        )
    run, wrong = recorded_server(url, seconds, requests, header or [], insecure)
    write_run(run, output, new=True)
    print(f"wrote {output}{' without its log' if wrong else ''}", file=sys.stderr)
    if wrong is not None:
        raise wrong
    print(f"  next: {command('explain', str(output))}", file=sys.stderr)
    return 0


def recorded_server(
    url: str, seconds: float, requests: Path | None, header: Sequence[str], insecure: bool
) -> tuple[Run, KvtuneError | None]:
    """Record a server for `seconds` or until Ctrl-C. Return the run, and the error if its log could not be used."""
    from kvtune.terminal import redraw
    from kvtune.watch.record import Recording, run_of
    from kvtune.watch.server import Server, headers_of
    from kvtune.watch.watching import Watching
    from kvtune.workload.requests_log import read_log

    def told(passed: float) -> bool:
        if sys.stderr.isatty():
            redraw(f"recording: {passed:.0f} of {seconds:.0f} s; Ctrl-C ends it")
        return True

    server = Server(url, headers_of(header), insecure)
    recording = Recording(Watching(server))
    try:
        try:
            if not sys.stderr.isatty():
                print(f"recording {server.base} for {seconds:.0f} s ..", file=sys.stderr)
            try:
                recording.run(seconds, told)
            finally:
                if sys.stderr.isatty():
                    redraw("")
        except KeyboardInterrupt:
            if not recording.looks:
                raise
            print("ended by Ctrl-C", file=sys.stderr)
        command = ["kvtune", *sys.argv[1:]]
        if requests is None:
            return run_of(recording, None, [], command), None
        try:
            return run_of(recording, requests, list(read_log(requests, server.tokenized)), command), None
        except KvtuneError as error:  # an unreadable log must not lose the recording
            return run_of(recording, None, [], command), error
    finally:
        recording.watching.close()
