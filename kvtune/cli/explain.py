"""`kvtune explain RUN`: which prompt tokens of a run were hits, why the others missed, and which setting helps."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from kvtune.base.commands import command
from kvtune.cli import options
from kvtune.cli.query import Lab, Query, When, option
from kvtune.data.show.terminal import one_line

if TYPE_CHECKING:
    from kvtune.answers.explain.explanation import Explanation
    from kvtune.data.run.extras import ServerAccount
    from kvtune.data.run.types import Run
    from kvtune.data.show.parts import Document

REPLAYED, LOG = ("run", "log"), "log"


@dataclass(frozen=True, kw_only=True)
class ExplainQuery(Query):
    FACTS = {
        "of": {
            "run": "the run of an engine or a simulator",
            "log": "--trace LOG, a log of requests",
            "server": "a server's recording without --trace",
        }
    }

    run: options.RunFile
    tries: Annotated[options.Tries, When("how many other settings are replayed", of=REPLAYED)] = 4
    save: bool = option(False, When("for the causes that a replay finds", of=REPLAYED))("""Store causes and
        remedies in the run file; its summary and page show them.""")
    trace: options.RunTrace = None
    model: str = option("", "MODEL", When("the model that is replayed", of=REPLAYED))("""The model of RUN,
        where the replay needs it.""")
    tokenizer: Annotated[options.Tokenizer, When("what reads a log's text", of=LOG)] = ""
    with_text: Annotated[options.WithText, When("for the texts of a log's prompts", of=LOG)] = False
    trust: Annotated[options.Trust, When("for what a replay takes from the file", of=REPLAYED)] = False
    json: options.Json = False
    md: options.Md = False
    page: options.Page = None


def explain(query: ExplainQuery, lab: Lab) -> int:
    """Count every prompt token of RUN as a hit or under one cause of miss, by an exact replay.

    A server's recording holds its causes: it is replayed only with --trace, the log of its requests.
    """
    from kvtune.answers.explain.document import document
    from kvtune.answers.explain.log import for_others
    from kvtune.cli.views.answer import print_answer
    from kvtune.data.run.file import read_run

    recorded = read_run(query.run)
    server = recorded.header.extra.server if query.trace is None else None
    log = query.trace is not None and recorded.header.workload.name == "requests"

    show = partial(print_answer, json=query.json, md=query.md, page=query.page)
    if server is not None:
        query.refuse(of="server")
        show(server, _server_document(recorded, server, str(query.run)))
        return 0
    query.refuse(of="log" if log else "run")
    _announce(query, recorded)
    explanation = _explanation(query, recorded, log, lab)
    kept = explanation if query.with_text else for_others(explanation)
    shown = kept if query.json or query.md or query.page else explanation
    show(shown, document(shown, str(query.run)))
    if query.save:
        stored = recorded if kept.texts is None else recorded.with_extra(texts=kept.texts)
        _store(stored, kept, query.run, query.trace)
    return 0


def _announce(query: ExplainQuery, recorded: Run) -> None:
    from kvtune.answers.explain.explanation import sent_requests
    from kvtune.base.units import count
    from kvtune.cli.views.plan import announce

    if query.trust:
        options.trusting(query.run, recorded.header.model, recorded.header.engine.args)
    replays = f"{query.tries + 2} replays or a few more" if query.tries else "1 replay"
    sent = count(int(sent_requests(recorded).sum()))
    announce(f"{replays} of {sent} requests without a model, no engine start")


def _explanation(query: ExplainQuery, recorded: Run, is_log: bool, lab: Lab) -> Explanation:
    """Replay the run; if its workload is a log, with the log's texts."""
    from kvtune.answers.explain.explanation import bench_of, explained
    from kvtune.answers.explain.log import explained_log, of_run
    from kvtune.cli.explain_log import renderer_of
    from kvtune.cli.views.progress import ProgressView, Replays
    from kvtune.lab.setup.resolve import tokenizer_of
    from kvtune.requests.loads.sources import Sources
    from kvtune.requests.types import AUTO, BYTES

    log, named, sources = None, "", Sources()
    if is_log:
        assert query.trace is not None
        named = query.tokenizer or tokenizer_of(query.model)
        renderer = renderer_of(named, sources)
        text = renderer.text if renderer is not None else None
        log = of_run(recorded, query.trace, sources.render(named or AUTO), text, bytes_=named == BYTES)
    with (
        ProgressView(recorded.header.workload.requests, recorded.header.model) as view,
        bench_of(
            recorded,
            view=Replays(view),
            trace=query.trace,
            model=query.model,
            trusted=query.trust,
            tokenizer=named,
            sources=sources,
            texts=log.edges if log is not None else None,
            lab=lab,
        ) as bench,
    ):
        return explained_log(bench, log, query.tries) if log is not None else explained(bench, query.tries)


def _server_document(recorded: Run, account: ServerAccount, file: str) -> Document:
    """Return a server's recording: where its prompt tokens went, by its own counters and events."""
    from kvtune.base.units import count, percent
    from kvtune.data.run.signature import run_identity
    from kvtune.data.show.parts import Document, Section
    from kvtune.reading.analysis.run import RunAnalysis
    from kvtune.reading.report.sections import fleet, over_time, server

    analysis = RunAnalysis(recorded)
    hit = percent(account.hit_tokens, account.query_tokens)
    shared = account.fleet
    whose = f"{len(shared.servers)} servers'" if shared is not None else "the server's"
    notes = Section("notes", "Notes", notes=tuple(recorded.header.notes))
    sections = (fleet.section(analysis), server.section(analysis), over_time.section(analysis), notes)
    return Document(
        "kvtune explain",
        file,
        f"{hit} of {whose} {count(account.query_tokens)} prompt tokens hit in {account.seconds:,.0f} s",
        tuple(section for section in sections if section is not None),
        run_identity(recorded.header),
        title=f"{file} · explain · kvtune",
    )


def _store(recorded: Run, explanation: Explanation, file: Path, trace: Path | None) -> None:
    """Store the causes in the run file, and draw its page again so that it shows them."""
    from kvtune.answers.explain.explanation import with_misses
    from kvtune.data.run.file import store_extra
    from kvtune.data.run.signature import run_identity, write_own, wrote
    from kvtune.data.show.page import document_page
    from kvtune.reading.analysis.rebuild import with_workload
    from kvtune.reading.analysis.run import RunAnalysis
    from kvtune.reading.report.run import document as run_document

    stored = with_misses(recorded, explanation).with_extra(replayed=explanation.replayed)
    extra = stored.header.extra
    store_extra(file, misses=extra.misses, replayed=extra.replayed, texts=extra.texts)
    print(one_line(f"stored the causes in {file}"), file=sys.stderr)
    page, identity = file.with_suffix(".html"), run_identity(stored.header)
    if not wrote(page, identity):
        print(f"  next: `{command('report', str(file))}` draws them", file=sys.stderr)
        return
    html = document_page(run_document(RunAnalysis(*with_workload(stored, trace), str(file))))
    write_own(html.encode(), page, identity, private=stored.private)
    print(one_line(f"drew {page} again"), file=sys.stderr)
