"""`kvtune watch URL`: a running server's hits, misses by cause and evictions, live."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from kvtune.base.errors import EXIT_FAILED, UsageError
from kvtune.cli import options
from kvtune.cli.query import Query, When, option
from kvtune.cli.record import server_of

if TYPE_CHECKING:
    from kvtune.servers.watch.addresses import Addresses
    from kvtune.servers.watch.endpoints import Named
    from kvtune.servers.watch.others import Others
    from kvtune.servers.watch.servers import Servers
    from kvtune.servers.watch.watched import Watched


LOOK_S = 2.0
AUDIT_S = 30.0
"""An audit that is shorter than 10 s cannot see that events come later than the counters, the last of its findings."""
ENDS = When("for a look that ends", "metrics board alerts")
LOOKED = (
    When("how long a look takes", once=True, prometheus=False),
    When("how long a look takes", json=True, prometheus=False),
    When("how long an audit takes", audit=True),
    When("how long a look takes", "metrics board alerts prometheus", prints="once"),
)
LISTED = When("for the list of prefixes", "audit metrics board alerts prometheus")
SERVED = When("the port of a watched server's metrics", "board alerts")
AUDITED = When("an audit, and asked alone", "once metrics board alerts prometheus", of="one")
LISTENED = When("for the events of one server", "board alerts prometheus", of="one")
BOUNDED = When("for what bounds a server", "audit metrics board alerts")


@dataclass(frozen=True, kw_only=True)
class WatchQuery(Query):
    FACTS = {
        "prints": {"once": "output that is no terminal"},
        "of": {"one": "one server", "several": "several servers"},
    }

    urls: Annotated[options.Urls, When("the servers that are watched", "board alerts prometheus")] = None
    urls_file: Annotated[options.UrlsFile, When("of watched servers", "board alerts prometheus")] = None
    prometheus: str = option("", "URL", When("asked alone", "metrics board alerts"))("""Say what bounded the
        servers of a job in the last hour, as this Prometheus has it.""")
    job: str = option("vllm", "NAME", When("a job of Prometheus", prometheus=True))("""The job of vLLM's
        servers in Prometheus' configuration.""")
    once: bool = option(False, When("for a look that ends", "metrics board alerts prometheus"))("""Look for a
        while (--seconds), print, and end.""")
    seconds: float | None = option(None, "S", *LOOKED, min=0.1)("""How long --once and --json look, for the
        rates (default 2), and --audit reads (default 30).""")
    with_text: bool = option(False, LISTED)("""Show the first words of each prefix: the server's /detokenize
        is asked.""")
    metrics: int | None = option(None, "PORT", SERVED, min=1, max=65535)("""Serve the account as Prometheus
        metrics until Ctrl-C, without the live view.""")
    metrics_host: str = option("127.0.0.1", "HOST", When("where the metrics are served", metrics=True))("""
        The address that --metrics listens at.""")
    audit: bool = option(False, AUDITED)("""Audit the KV events for --seconds: exit code 1 if an index that
        is built on them would be wrong.""")
    allow: list[str] | None = option(None, "FINDING", When("a finding of --audit", audit=True))("""A finding
        of --audit that your index knows, e.g. stored_twice; may be repeated.""")
    board: bool = option(False)("Print a Grafana board for these metrics and vLLM's own, and end.")
    alerts: bool = option(False, When("a file, and each is printed alone", board=False))("""Print alert rules
        for Prometheus, and end.""")
    events: Annotated[options.EventsAt, When("of a watched server", "board alerts prometheus")] = None
    listen: Annotated[options.Listen, LISTENED] = ""
    max_num_seqs: int = option(0, "N", BOUNDED, min=0)("""The server's own, to tell what bounds it; 0: as its
        /server_info says, if that is open.""")
    max_num_batched_tokens: int = option(0, "N", BOUNDED, min=0)("The server's own, likewise.")
    header: Annotated[options.Header, When("of a watched server", "board alerts")] = None
    insecure: Annotated[options.Insecure, When("of a watched server", "board alerts")] = False
    json: Annotated[options.Json, ENDS] = False
    md: Annotated[bool, options.MARKDOWN, When(options.NO_MD.why, "json metrics board alerts")] = False
    page: Annotated[options.Page, ENDS] = None

    @property
    def asked_once(self) -> bool:
        return self.once or self.json or self.md or self.page is not None


def watch(query: WatchQuery) -> int:
    """Watch the prefix cache of a running vLLM server. It needs no plugin, sends no load and changes nothing."""
    from kvtune.servers.watch.addresses import Addresses
    from kvtune.servers.watch.cache import rare_collections

    if query.board or query.alerts:
        from kvtune.servers.watch import export

        print(export.board() if query.board else export.alerts(), end="")
        return 0
    if query.prometheus:
        _ask_prometheus(query)
        return 0
    if not query.urls and query.urls_file is None:
        raise UsageError("watch needs the URL of a running server", "kvtune watch http://HOST:PORT")
    addresses = Addresses(query.urls or [], query.urls_file, query.events or [], listen=query.listen)
    with rare_collections():
        return _watch(query, addresses)


def _watch(query: WatchQuery, addresses: Addresses) -> int:
    """Watch one server, or several."""
    from kvtune.servers.watch.servers import Servers

    alone = addresses.only
    if query.audit:
        query.refuse(of="one" if alone else "several")
        return _audit(query, alone)
    ends = query.metrics is None and (query.asked_once or not sys.stdout.isatty())
    query.refuse(prints="once" if ends else "live", of="one" if alone else "several")

    def servers() -> Servers:
        return Servers(addresses, partial(_watched, query))

    if query.metrics is not None:
        from kvtune.servers.watch.export import Exporter

        say = partial(print, file=sys.stderr, flush=True)
        Exporter(servers, say).run(query.metrics, query.metrics_host)
        return 0
    watched = servers()
    try:
        watched.start()
        if ends:
            _look(query, watched)
            return 0
        from kvtune.servers.watch.screen import View

        print(
            "KV events carry token ids in clear, without authentication. kvtune only reads.", file=sys.stderr
        )
        View(watched.look, Path.cwd()).run()
        return 0
    finally:
        watched.close()


def _ask_prometheus(query: WatchQuery) -> None:
    from kvtune.cli.views.answer import print_answer
    from kvtune.servers.watch.client import Client, base_of, headers_of
    from kvtune.servers.watch.prometheus import document, read_hour
    from kvtune.servers.watch.regime import Limits

    client = Client(base_of(query.prometheus), headers_of(query.header or []), query.insecure)
    try:
        limits = Limits(query.max_num_seqs, query.max_num_batched_tokens)
        hour = read_hour(client, query.job, time.time(), limits)
    finally:
        client.close()
    print_answer(hour, document(hour), json=query.json, md=query.md, page=query.page)


def _audit(query: WatchQuery, url: str) -> int:
    from kvtune.cli.views.answer import print_answer
    from kvtune.servers.watch.audit import audit_server, document
    from kvtune.servers.watch.endpoints import Named

    named = Named(query.events or [], query.listen)  # before the client, which must be closed
    server = server_of(url, query.header, query.insecure)
    try:
        answer = audit_server(server, named, query.seconds or AUDIT_S, query.allow or [])
    finally:
        server.close()
    print_answer(answer, document(answer), json=query.json, md=query.md, page=query.page)
    return EXIT_FAILED if answer.failed else 0


def _watched(query: WatchQuery, url: str, named: Named, others: Others | None) -> Watched:
    from kvtune.data.layout.model_config import shape_at_hand
    from kvtune.servers.watch.regime import Limits
    from kvtune.servers.watch.watched import ASK_S, Watched

    server = server_of(url, query.header, query.insecure)
    if query.metrics is not None:
        return Watched(server, named, others, ask_s=ASK_S)
    return Watched(
        server,
        named,
        others,
        with_text=query.with_text,
        ask_s=0.0 if query.asked_once else ASK_S,
        shape_at_hand=shape_at_hand,
        limits=Limits(query.max_num_seqs, query.max_num_batched_tokens),
    )


def _look(query: WatchQuery, servers: Servers) -> None:
    """Look at the servers for a while, and print what it came to."""
    from kvtune.cli.views.answer import print_answer
    from kvtune.servers.watch.document import document

    end = time.monotonic() + (query.seconds or LOOK_S)
    shot = servers.look()
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(0.5, left))
        shot = servers.look()
    print_answer(shot, document(shot), json=query.json, md=query.md, page=query.page)
