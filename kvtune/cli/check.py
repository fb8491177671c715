"""`kvtune check URL`: does a hit give the answer that a recomputation gives?"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvtune.base.errors import EXIT_FAILED, EXIT_UNKNOWN, UsageError, reason
from kvtune.cli import options
from kvtune.cli.query import Query, When, option

if TYPE_CHECKING:
    from kvtune.answers.check.result import Bundle

MOST_BYTES = 256 << 20
NEW = When("for new prompts", "replay resume")
ALONE = When("the prompts of a bundle", resume=False)


@dataclass(frozen=True, kw_only=True)
class CheckQuery(Query):
    url: options.Url
    prompts: int = option(32, "N", NEW, min=2)("""How many prompts take each path. With 32, a fault in one of
        ten hits is seen with up to 97 %.""")
    tokens: int = option(16, "N", NEW, min=1, max=100)("Length of each answer.")
    fill: bool = option(False)(
        "Fill the pool, and empty it for a tier: all that the server holds is evicted."
    )
    yes: bool = option(False)("Send the requests without asking.")
    bundle: Path | None = option(
        None, "-o,--bundle FILE"
    )("""Write prompts as token ids, answers and layout to
        a new file.""")
    replay: Path | None = option(None, "FILE", ALONE)("Ask the prompts of a bundle again.")
    resume: Path | None = option(None, "FILE")("""Ask the prompts of a bundle after a restart of the server:
        what its tier still has must hit.""")
    seed: Annotated[options.Seed, NEW] = 0
    header: options.Header = None
    insecure: options.Insecure = False
    json: options.Json = False
    md: options.Md = False
    page: options.Page = None


def check(query: CheckQuery) -> int:
    """Ask a running server prompts that hit, and compare each answer with one that is computed anew.

    Sends load, after it said how much. Exit code: 1 if hits differ, 3 if that cannot be told.
    """
    from msgspec.json import encode
    from msgspec.structs import replace

    from kvtune import __version__
    from kvtune.answers.check.asking import Asker, Priced, layout_of, prompts
    from kvtune.answers.check.course import Course
    from kvtune.answers.check.document import document
    from kvtune.answers.check.paths import PATHS, RESTARTED, why_not
    from kvtune.answers.check.result import Bundle
    from kvtune.answers.check.verdict import answer
    from kvtune.base.files import write_new
    from kvtune.base.units import count
    from kvtune.cli.views.answer import print_answer
    from kvtune.cli.views.plan import begin
    from kvtune.cli.watch import shape_at_hand
    from kvtune.servers.watch.client import headers_of
    from kvtune.servers.watch.server import Server

    old = _bundle(query.resume or query.replay)
    if query.bundle is not None and os.path.lexists(query.bundle):  # before any work
        raise UsageError(f"{query.bundle} exists", "give another name with -o FILE")
    server = Server(query.url, headers_of(query.header or []), query.insecure)
    try:
        layout, model = layout_of(server, shape_at_hand)
        asked = old.prompts if old else prompts(server, layout, query.prompts, query.seed)
        tokens, paths = old.tokens if old else query.tokens, RESTARTED if query.resume else PATHS
        shown = {name: path for name, path in paths.items() if not why_not(name, path, layout, query.fill)}
        salts = old.salts if old and query.resume else []
        price = Priced(server, model)
        Course(price, layout, asked, tokens, lambda text: None).run(shown, salts)
        load = f"{count(price.sent)} requests with {count(price.computed)} prompt tokens to {server.base}"
        if not query.yes and not sys.stdin.isatty():
            raise UsageError(f"check would send {load}, and there is no terminal to ask", "add --yes")
        if not query.yes and not typer.confirm(f"Send {load}? They replace what its cache holds", err=True):
            return EXIT_UNKNOWN
        begin(load)
        course = Course(Asker(server, model, layout.tier), layout, asked, tokens, begin)
        course.run(shown, salts)
        made = answer(course, paths, query.fill, server.version())
    finally:
        server.close()
    made = replace(made, bundle="" if query.bundle is None else str(query.bundle))
    try:
        if query.bundle is not None:
            whole = Bundle(__version__, tokens, made, list(asked), course.salts, course.compared)
            write_new(encode(whole).decode(), query.bundle, private=True)
    finally:
        print_answer(made, document(made), json=query.json, md=query.md, page=query.page)
    return {"differs": EXIT_FAILED, "as cold": 0}.get(made.verdict, EXIT_UNKNOWN)


def _bundle(path: Path | None) -> Bundle | None:
    """Read the bundle of an earlier check."""
    from kvtune.answers.check.result import Bundle
    from kvtune.base.bounded import decode_json_as
    from kvtune.base.files import read_regular

    if path is None:
        return None
    try:
        bundle = decode_json_as(read_regular(path, MOST_BYTES), Bundle)
        numbers = [prompt.number for prompt in bundle.prompts]
        if len(numbers) < 2 or numbers != list(range(len(bundle.salts))):
            raise ValueError("its prompts are not numbered")
        return bundle
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path} is no bundle of a check: {reason(error)}", "kvtune check -o FILE writes one"
        ) from None
