"""`kvtune explain RUN`: which prompt tokens of a run were hits, why the others missed, and which setting helps."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from kvtune.cli import options
from kvtune.cli.query import Facts, Lab, Query, When
from kvtune.commands import command
from kvtune.terminal import one_line

if TYPE_CHECKING:
    from kvtune.explain.explanation import Bench, Explanation
    from kvtune.explain.log import TextLog
    from kvtune.run.extras import TextAccount
    from kvtune.run.types import Run

REPLAYED, LOG = ("run", "log"), "log"


@dataclass(frozen=True, kw_only=True)
class ExplainQuery(Query):
    FACTS: ClassVar[Facts] = {
        "of": {
            "run": "the run of an engine or a simulator",
            "log": "--trace LOG, a log of requests",
            "server": "a server's recording without --trace",
        }
    }

    run: options.RunFile
    tries: Annotated[options.Tries, When("how many other settings are replayed", of=REPLAYED)] = 4
    save: Annotated[
        bool,
        typer.Option(
            "--save", help="Store causes and remedies in the run file; its summary and page show them."
        ),
        When("for the causes that a replay finds", of=REPLAYED),
    ] = False
    trace: options.RunTrace = None
    model: Annotated[
        str,
        typer.Option("--model", help="The model of RUN, where the replay needs it.", metavar="MODEL"),
        When("the model that is replayed", of=REPLAYED),
    ] = ""
    tokenizer: Annotated[options.Tokenizer, When("what reads a log's text", of=LOG)] = ""
    with_text: Annotated[options.WithText, When("for the texts of a log's prompts", of=LOG)] = False
    trust: Annotated[options.Trust, When("for what a replay takes from the file", of=REPLAYED)] = False
    json: options.Json = False


def explain(query: ExplainQuery, lab: Lab) -> int:
    """Count every prompt token of RUN as a hit or under one cause of miss, by an exact replay.

    A server's recording holds its causes: it is replayed only with --trace, the log of its requests.
    """
    from kvtune.run.file import read_run

    recorded = read_run(query.run)
    server = recorded.header.extra.server is not None and query.trace is None
    log = query.trace is not None and recorded.header.workload.name == "requests"
    query.refuse(of="server" if server else "log" if log else "run")
    if server:
        _print_server(recorded, json=query.json)
        return 0
    _announce(query, recorded)
    with _bench(query, recorded, log, lab) as (bench, texts):
        explanation, account = _explained(query, bench, texts)
    kept = _kept(query, account)
    _print(query, explanation, kept, account)
    if query.save:
        stored = recorded if kept is None else recorded.with_extra(texts=kept)
        _store(stored, explanation, query.run, query.trace)
    return 0


def _announce(query: ExplainQuery, recorded: Run) -> None:
    from kvtune.cli.views.plan import announce
    from kvtune.explain.explanation import sent_requests
    from kvtune.units import count

    if query.trust:
        options.trusting(query.run, recorded.header.model, recorded.header.engine.args)
    replays = f"{query.tries + 2} replays or a few more" if query.tries else "1 replay"
    sent = count(int(sent_requests(recorded).sum()))
    announce(f"{replays} of {sent} requests without a model, no engine start")


@contextmanager
def _bench(
    query: ExplainQuery, recorded: Run, is_log: bool, lab: Lab
) -> Iterator[tuple[Bench, TextLog | None]]:
    """Yield what replays the run, and the texts of its log if its workload is one."""
    from kvtune.cli.explain_log import renderer_of
    from kvtune.engine.resolve import tokenizer_of
    from kvtune.explain.explanation import bench_of
    from kvtune.explain.log import of_run
    from kvtune.explain.text import ConsoleView
    from kvtune.workload.rendering import AUTO, BYTES
    from kvtune.workload.sources import Sources

    log, named, sources = None, "", Sources()
    if is_log:
        assert query.trace is not None
        named = query.tokenizer or tokenizer_of(query.model)
        known = renderer_of(named, sources)
        text = known.text if known is not None else None
        log = of_run(recorded, query.trace, sources.render(named or AUTO), text, bytes_=named == BYTES)
    with bench_of(
        recorded,
        view=ConsoleView(),
        trace=query.trace,
        model=query.model,
        trusted=query.trust,
        tokenizer=named,
        sources=sources,
        texts=log.edges if log is not None else None,
        lab=lab,
    ) as bench:
        yield bench, log


def _explained(
    query: ExplainQuery, bench: Bench, log: TextLog | None
) -> tuple[Explanation, TextAccount | None]:
    from kvtune.explain.explanation import explained
    from kvtune.explain.log import account_of, with_gains

    explanation = explained(bench, query.tries)
    if log is None:
        return explanation, None
    account = with_gains(account_of(log, explanation), log, bench, query.tries)
    return replace(explanation, texts=account), account


def _kept(query: ExplainQuery, account: TextAccount | None) -> TextAccount | None:
    """Return the account as it is stored and passed on: with the prompts' texts only where the user says so."""
    from kvtune.explain.log import without_text

    return account if account is None or query.with_text else without_text(account)


def _print(
    query: ExplainQuery, explanation: Explanation, kept: TextAccount | None, account: TextAccount | None
) -> None:
    if query.json:
        from msgspec import to_builtins

        from kvtune.explain.text import to_json

        options.print_json(to_json(explanation) | ({"texts": to_builtins(kept)} if kept else {}))
        return
    from kvtune.explain.text import WIDTH, lines
    from kvtune.terminal import width

    for line in lines(explanation, min(WIDTH, width(WIDTH))):
        print(line)
    if account is not None:
        from kvtune.report.console.summary import print_section
        from kvtune.report.sections.text import drawn

        print_section(drawn(account), width=WIDTH)


def _print_server(recorded: Run, *, json: bool) -> None:
    """Print a server's recording: where its prompt tokens went, by its own counters and events."""
    if json:
        from msgspec import to_builtins

        options.print_json(to_builtins(recorded.header.extra.server))
        return
    from kvtune.analysis.run import RunAnalysis
    from kvtune.report.console.summary import print_section
    from kvtune.report.sections import over_time, server
    from kvtune.terminal import folded, width

    analysis = RunAnalysis(recorded)
    for part in (server, over_time):
        print_section(part.section(analysis), width=100)
    for note in recorded.header.notes:
        print("\n".join(folded(one_line(f"note: {note}"), width(100))))


def _store(recorded: Run, explanation: Explanation, file: Path, trace: Path | None) -> None:
    """Store the causes in the run file, and draw its page again so that it shows them."""
    from kvtune.analysis.rebuild import with_workload
    from kvtune.analysis.run import RunAnalysis
    from kvtune.explain.explanation import with_misses
    from kvtune.report.pages.run import run_page
    from kvtune.run.file import store_extra
    from kvtune.run.signature import run_identity, write_own, wrote

    stored = with_misses(recorded, explanation).with_extra(replayed=explanation.replayed)
    extra = stored.header.extra
    store_extra(file, misses=extra.misses, replayed=extra.replayed, texts=extra.texts)
    print(one_line(f"stored the causes in {file}"), file=sys.stderr)
    page, of = file.with_suffix(".html"), run_identity(stored.header)
    if not wrote(page, of):
        print(f"  next: `{command('report', str(file))}` draws them", file=sys.stderr)
        return
    html = run_page(RunAnalysis(*with_workload(stored, trace), str(file)))
    write_own(html.encode(), page, of, private=stored.private)
    print(one_line(f"drew {page} again"), file=sys.stderr)
