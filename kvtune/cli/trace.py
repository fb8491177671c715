"""`kvtune trace`: what a load is, of any workload, trace or log."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from kvtune.cli import options
from kvtune.cli.query import Query
from kvtune.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class TraceQuery(Query):
    workload: options.Workload = ""
    block_size: Annotated[int, typer.Option("--block-size", min=1, help="Tokens per block.")] = 16
    seed: options.Seed = 0
    json: options.Json = False


def trace(query: TraceQuery) -> int:
    """Describe a load: requests, sessions, lengths, pauses, reuse, what an infinite cache hits. Starts no engine."""
    from msgspec import to_builtins
    from msgspec.structs import replace

    from kvtune.bounds.loads import of_sessions, of_workload
    from kvtune.bounds.text import load_lines
    from kvtune.terminal import folded, one_line, width
    from kvtune.workload.spec import build, has_slots, parsed, session_load

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
    if query.json:
        options.print_json(to_builtins(facts))
        return 0
    for line in load_lines(facts):
        print("\n".join(folded(one_line(line), width(120))))
    return 0
