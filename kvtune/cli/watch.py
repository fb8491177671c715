"""`kvtune watch URL`: a running server's hits, misses by cause and evictions, live."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from kvtune.cli import options
from kvtune.errors import UsageError


def watch(
    url: options.Url = "",
    once: Annotated[
        bool, typer.Option("--once", help="Look for a while (--seconds), print, and end.")
    ] = False,
    seconds: Annotated[
        float,
        typer.Option(
            "--seconds", min=0.1, help="How long --once and --json look, for the rates.", metavar="S"
        ),
    ] = 2.0,
    with_text: Annotated[
        bool,
        typer.Option(
            "--with-text", help="Show the first words of each prefix: the server's /detokenize is asked."
        ),
    ] = False,
    metrics: Annotated[
        int | None,
        typer.Option(
            "--metrics",
            min=1,
            max=65535,
            help="Serve the account as Prometheus metrics until Ctrl-C, without the live view.",
            metavar="PORT",
        ),
    ] = None,
    metrics_host: Annotated[
        str, typer.Option("--metrics-host", help="The address that --metrics listens at.", metavar="HOST")
    ] = "127.0.0.1",
    board: Annotated[
        bool,
        typer.Option(
            "--board",
            help="Print a Grafana board for these metrics and vLLM's own, and end.",
        ),
    ] = False,
    alerts: Annotated[
        bool,
        typer.Option(
            "--alerts",
            help="Print alert rules for Prometheus, and end.",
        ),
    ] = False,
    events: options.EventsAt = None,
    listen: options.Listen = "",
    header: options.Header = None,
    insecure: options.Insecure = False,
    json: options.Json = False,
) -> int:
    """Watch the prefix cache of a running vLLM server. It needs no plugin, sends no load and changes nothing."""
    if board or alerts:
        from kvtune.watch import export

        print(export.board() if board else export.alerts(), end="")
        return 0
    if not url:
        raise UsageError("watch needs the URL of a running server", "kvtune watch http://HOST:PORT")
    from kvtune.terminal import width
    from kvtune.watch.client import headers_of
    from kvtune.watch.endpoints import Named
    from kvtune.watch.screen import View, page
    from kvtune.watch.server import Server
    from kvtune.watch.watching import ASK_S, Watching

    named = Named(events or [], listen)

    def new() -> Watching:
        server = Server(url, headers_of(header or []), insecure)
        ask_s = 0.0 if once or json else ASK_S
        return Watching(server, named, with_text=with_text and metrics is None, ask_s=ask_s)

    if metrics is not None:
        if once or json:
            raise UsageError("--metrics serves until Ctrl-C; --once and --json end", "give one of them")
        from kvtune.watch.export import Exporter

        Exporter(new, lambda text: print(text, file=sys.stderr, flush=True)).run(metrics, metrics_host)
        return 0
    watching = new()
    try:
        watching.start()
        if json or once or not sys.stdout.isatty():
            end = time.monotonic() + seconds
            shot = watching.look()
            while (left := end - time.monotonic()) > 0:
                time.sleep(min(0.5, left))
                shot = watching.look()
            if json:
                import msgspec

                options.print_json(msgspec.to_builtins(shot))
            else:
                print("\n".join(page(shot, width(100))))
            return 0
        print(
            "KV events carry token ids in clear, without authentication. kvtune only reads.", file=sys.stderr
        )
        View(watching.look, Path.cwd()).run()
        return 0
    finally:
        watching.close()
