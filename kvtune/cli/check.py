"""`kvtune check URL`: does a hit give the answer that a recomputation gives?"""

from __future__ import annotations

import sys
from contextlib import closing
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from kvtune.base.errors import EXIT_FAILED, EXIT_UNKNOWN, UsageError
from kvtune.cli import options
from kvtune.cli.query import Query, When, option

MADE = When("how prompts are made", replay=False)


@dataclass(frozen=True, kw_only=True)
class CheckQuery(Query):
    url: options.Url
    prompts: int = option(32, "N", MADE, min=2, max=256)("""How many prompts take each path. With 32, a fault in
        one of ten hits is seen with up to 97 %.""")
    tokens: int = option(16, "N", min=1, max=100)("Length of each answer.")
    replay: Path | None = option(None, "FILE")("Prompts of an earlier --json, which a tier may have kept.")
    fill: bool = option(False)("Fill the pool, and empty it for a tier: evicts what the server holds.")
    yes: bool = option(False)("Send the requests without asking.")
    seed: Annotated[options.Seed, MADE] = 0
    header: options.Header = None
    insecure: options.Insecure = False
    json: options.Json = False
    md: options.Md = False
    page: options.Page = None


def check(query: CheckQuery) -> int:
    """Ask a running server prompts that hit, and compare each answer with one that is computed anew.

    Sends load, after it said how much. Exit code: 1 if hits differ, 3 if that cannot be told.
    """
    from kvtune.answers.check.course import Course, Earlier, earlier, layout_of, prompts
    from kvtune.answers.check.document import document
    from kvtune.answers.check.result import answer
    from kvtune.base.units import count
    from kvtune.cli.views.answer import print_answer
    from kvtune.cli.views.plan import begin
    from kvtune.data.layout.model_config import shape_at_hand
    from kvtune.data.show.terminal import one_line
    from kvtune.servers.watch.client import headers_of
    from kvtune.servers.watch.server import Server

    file = earlier(query.replay) if query.replay else None
    with closing(Server(query.url, headers_of(query.header or []), query.insecure)) as server:
        layout = layout_of(server, shape_at_hand)
        file = file or Earlier([*prompts(server, layout, query.prompts, query.seed)], [""] * query.prompts)
        asked = file.prompts, file.salts, server, query.tokens, query.fill
        course = Course(*asked, model=one_line(server.card().id), layout=layout)
        price = copy(course).run()
        load = f"{count(price.requests)} requests with {count(price.computed_tokens)} prompt tokens to {server.base}"
        if took := price.seconds():
            load += f", {took / 60:,.1f} minutes at its pace until now"
        if not query.yes and not sys.stdin.isatty():
            raise UsageError(f"check would send {load}, and there is no terminal to ask", "add --yes")
        if not query.yes and not typer.confirm(f"Send {load}? They replace what its cache holds", err=True):
            return EXIT_UNKNOWN
        begin(load)
        made = answer(course.run(begin))
    print_answer(made, document(made), json=query.json, md=query.md, page=query.page)
    return {"differs": EXIT_FAILED, "as cold": 0}.get(made.verdict, EXIT_UNKNOWN)
