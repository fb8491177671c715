"""`kvtune trace`: what a load is, of any workload, trace or log."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from kvtune.base.errors import UsageError
from kvtune.cli import options
from kvtune.cli.query import Query, When


@dataclass(frozen=True, kw_only=True)
class TraceQuery(Query):
    workload: options.Workload = ""
    block_size: Annotated[int, typer.Option("--block-size", min=1, help="Tokens per block.")] = 16
    seed: options.Seed = 0
    json: options.Json = False
    md: Annotated[options.Md, When(options.NO_MD, json=False)] = False
    page: options.Page = None


def trace(query: TraceQuery) -> int:
    """Describe a load: requests, sessions, lengths, pauses, reuse, what an infinite cache hits. Starts no engine."""
    from msgspec.structs import replace

    from kvtune.cli.views.answer import print_answer
    from kvtune.reading.bounds.document import load_document
    from kvtune.reading.bounds.loads import of_sessions, of_workload
    from kvtune.requests.loads.spec import build, has_slots, parsed, session_load

    if not query.workload:
        raise UsageError("give a load with -w", "for instance -w trace:format=weka,path=FOLDER")
    load, why = None, ""
    if parsed(query.workload, query.seed)[0].loader is not None:
        try:
            load = session_load(query.workload, seed=query.seed)
        except (
            UsageError
        ) as error:  # not a load of sessions; what is wrong with the file itself, `build` says
            why = f"no sessions: {error.message}"
    if load is not None and not load.timed and not has_slots(query.workload):
        facts = of_sessions(load, query.workload, query.block_size)
    else:
        facts = of_workload(build(query.workload, seed=query.seed), query.block_size)
        if load is not None:
            facts = replace(facts, sessions=of_sessions(load, query.workload, query.block_size).sessions)
        elif why:
            facts = replace(facts, notes=[*facts.notes, why])
    print_answer(facts, load_document(facts), json=query.json, md=query.md, page=query.page)
    return 0
