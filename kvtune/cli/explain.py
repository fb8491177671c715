"""`kvtune explain`: which prompt tokens of a run were hits, why the others missed, and which setting helps."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvtune.cli import options
from kvtune.commands import command
from kvtune.errors import UsageError
from kvtune.terminal import one_line

if TYPE_CHECKING:
    from kvtune.run.types import Run


def explain(
    ctx: typer.Context,
    run: options.RunOrUrl = None,
    workload: Annotated[
        str,
        typer.Option(
            "-w",
            "--workload",
            help="In place of RUN, a log of requests, requests:path=LOG: which text of its prompts breaks the prefix, "
            "and what mending it brings. vLLM's own flags go after `--`.",
        ),
    ] = "",
    tries: options.Tries = 4,
    save: Annotated[
        bool,
        typer.Option(
            "--save",
            help="Store causes and remedies in the run file, so that its summary and page show them.",
        ),
    ] = False,
    trace: options.RunTrace = None,
    model: Annotated[
        str,
        typer.Option(
            "--model",
            help="The model of RUN, where the replay needs it; the model that a log is sent to.",
            metavar="MODEL",
        ),
    ] = "",
    tokenizer: Annotated[
        str,
        typer.Option(
            "--tokenizer",
            help="What renders a log's text: a tokenizer's folder or cached name. Default: the model's own.",
        ),
    ] = "",
    text_only: Annotated[
        bool,
        typer.Option("--text-only", help="With -w: compare UTF-8 bytes, without a tokenizer and a replay."),
    ] = False,
    bounds_only: Annotated[
        bool,
        typer.Option(
            "--bounds-only", help="With -w: no replay of vLLM's cache, but of one that keeps everything."
        ),
    ] = False,
    with_text: Annotated[
        bool,
        typer.Option("--with-text", help="JSON and run file hold the texts of a log's examples, too."),
    ] = False,
    fail_on: Annotated[
        str,
        typer.Option(
            "--fail-on",
            help="With -w: exit with 1 where this holds, e.g. 'diverged > 5 %' of all prompt tokens.",
            metavar="CONDITION",
        ),
    ] = "",
    mended: Annotated[
        Path | None,
        typer.Option("--mended", help="With -w: write the mended log, as token ids.", metavar="FILE"),
    ] = None,
    core: options.Core = "kvtune",
    like_device: options.LikeDevice = "",
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", help="With -w: a run file of the replay, for report and compare.", metavar="RUN"
        ),
    ] = None,
    trust: options.Trust = False,
    seconds: Annotated[
        float, typer.Option("--seconds", min=1, help="How long a running server is recorded.", metavar="S")
    ] = 60.0,
    requests: options.RequestsLog = None,
    events: options.EventsAt = None,
    listen: options.Listen = "",
    header: options.Header = None,
    insecure: options.Insecure = False,
    json: options.Json = False,
) -> int:
    """Count every prompt token of RUN as a hit or under one cause of miss, by an exact replay."""
    from kvtune.cli.app import engine_args

    if (run is None) == (not workload):
        raise UsageError(
            "give one of RUN, URL and -w requests:path=LOG", "for instance `kvtune explain last`"
        )
    if workload:
        from kvtune.cli.explain_log import Asked, explain_log

        if save or trust or trace is not None or requests is not None or header or events or listen:
            raise UsageError(
                "--save, --trace, --trust, --requests, --header, --events and --listen are for a run file or a server",
                "-w has the log; -o FILE keeps its replay as a run file",
            )
        return explain_log(
            Asked(
                spec=workload,
                model=model,
                tokenizer=tokenizer,
                text_only=text_only,
                bounds_only=bounds_only,
                with_text=with_text,
                fail_on=fail_on,
                core=core,
                like_device=like_device,
                flags=engine_args(ctx),
                output=output,
                mended=mended,
                tries=tries,
                json=json,
            )
        )
    if text_only or bounds_only or fail_on or output or mended:
        raise UsageError(
            "--text-only, --bounds-only, --fail-on, --mended and -o are for a log of requests",
            "add -w requests:path=LOG",
        )
    if core != "kvtune" or like_device or engine_args(ctx):
        raise UsageError(
            "--core, --like-device and flags after `--` are for a log of requests",
            "a run is replayed as it ran; with other settings: `kvtune profile .. --on sim --like RUN`",
        )
    if isinstance(run, str) and (trace is not None or save or model):
        raise UsageError(
            "--trace, --model and --save are for a run file",
            f"{command('record', run, '-o', 'FILE')}, then explain FILE",
        )
    if not isinstance(run, str) and requests is not None:
        raise UsageError(
            "--requests is for a running server", f"a run file is replayed with --trace {requests}"
        )
    from kvtune.cli.views.plan import announce
    from kvtune.explain.explanation import bench_of, explained, with_misses
    from kvtune.explain.replays import sent_requests
    from kvtune.explain.text import ConsoleView
    from kvtune.run.file import read_run
    from kvtune.units import count

    if isinstance(run, str):
        from kvtune.cli import signals
        from kvtune.cli.record import recorded_server
        from kvtune.watch.client import headers_of
        from kvtune.watch.endpoints import Named
        from kvtune.watch.server import Server
        from kvtune.watch.watching import Watching

        server = Server(run, headers_of(header or []), insecure)
        watching = Watching(server, Named(events or [], listen))
        with signals.noted() as signalled:
            recorded, wrong = recorded_server(watching, seconds, requests, signalled)
        if wrong is not None:
            print(one_line(f"the log was left out: {wrong.message}"), file=sys.stderr)
    else:
        recorded = read_run(run)
    if recorded.header.extra.server is not None and trace is None:
        if save or model:
            raise UsageError(
                f"{run} is a server's: its settings are replayed with the log of its requests",
                "add --trace LOG",
            )
        return _server(recorded, json)
    assert isinstance(run, Path)
    if trust:
        options.trusting(run, recorded.header.model, recorded.header.engine.args)
    sent = int(sent_requests(recorded).sum())
    replays = f"{tries + 2} replays or a few more" if tries else "1 replay"
    announce(f"{replays} of {count(sent)} requests without a model, no engine start")
    log, named = None, ""
    if trace is not None and recorded.header.workload.name == "requests":
        from kvtune.cli.explain_log import renderer_of
        from kvtune.engine.resolve import tokenizer_of
        from kvtune.explain.log import of_run

        named = tokenizer or tokenizer_of(model)
        known = renderer_of(named)
        log = of_run(recorded, trace, named, known.text if known is not None else None)
    texts = kept = None
    with bench_of(
        recorded,
        view=ConsoleView(),
        trace=trace,
        model=model,
        trusted=trust,
        tokenizer=named,
        after=log.after if log is not None else None,
    ) as bench:
        explanation = explained(bench, tries)
        if log is not None:
            from kvtune.explain.log import account_of, with_gains, without_text

            texts = with_gains(account_of(log, explanation), log, bench, tries)
            kept = texts if with_text else without_text(texts)
            explanation = replace(explanation, texts=texts)
    if json:
        from msgspec import to_builtins

        from kvtune.explain.text import to_json

        options.print_json(to_json(explanation) | ({"texts": to_builtins(kept)} if kept else {}))
    else:
        from kvtune.explain.text import WIDTH, lines
        from kvtune.terminal import width

        for line in lines(explanation, min(WIDTH, width(WIDTH))):
            print(line)
        if texts is not None:
            from kvtune.report.console.summary import print_section
            from kvtune.report.sections.text import drawn

            print_section(drawn(texts), width=WIDTH)
    if save:
        stored = with_misses(recorded, explanation).with_extra(replayed=explanation.replayed)
        if kept is not None:
            stored = stored.with_extra(texts=kept)
        _store(stored, run, trace)
    return 0


def _server(recorded: Run, json: bool) -> int:
    if json:
        from msgspec import to_builtins

        options.print_json(to_builtins(recorded.header.extra.server))
        return 0
    from kvtune.analysis.run import RunAnalysis
    from kvtune.report.console.summary import print_section
    from kvtune.report.sections import over_time, server
    from kvtune.terminal import folded, width

    analysis = RunAnalysis(recorded)
    for part in (server, over_time):
        print_section(part.section(analysis), width=100)
    for note in recorded.header.notes:
        print("\n".join(folded(one_line(f"note: {note}"), width(100))))
    return 0


def _store(explained: Run, file: Path, trace: Path | None) -> None:
    """Store the causes in the run file, and draw its page again so that it shows them."""
    from kvtune.analysis.rebuild import with_workload
    from kvtune.analysis.run import RunAnalysis
    from kvtune.report.pages.run import run_page
    from kvtune.run.file import store_extra
    from kvtune.run.signature import run_identity, write_own, wrote

    extra = explained.header.extra
    store_extra(file, misses=extra.misses, replayed=extra.replayed, texts=extra.texts)
    print(one_line(f"stored the causes in {file}"), file=sys.stderr)
    page, of = file.with_suffix(".html"), run_identity(explained.header)
    if not wrote(page, of):
        print(f"  next: `{command('report', str(file))}` draws them", file=sys.stderr)
        return
    html = run_page(RunAnalysis(*with_workload(explained, trace), str(file)))
    write_own(html.encode(), page, of, private=explained.private)
    print(one_line(f"drew {page} again"), file=sys.stderr)
