"""`kvtune tap URL`: a relay before a running server: a line a request, and a log of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from kvtune.cli import options
from kvtune.cli.query import Query, When, option

SHOWN = (When("for the log", no_log=False), When("for the requests that are printed", json=True))


@dataclass(frozen=True, kw_only=True)
class TapQuery(Query):
    url: options.Url
    listen: str = option("127.0.0.1:8001", "ADDRESS")("""Where clients send their requests: PORT, or
        ADDRESS:PORT. Whoever reaches an address that is not this machine's own can use the server.""")
    log: Path | None = option(
        None, "-o,--log FILE", When("for a log", no_log=False), parser=options.new_log_path
    )("""The log of the
        requests: a new file, or a log of kvtune to add to. Default: tap-TIME.jsonl in the output folder.""")
    no_log: bool = option(False)("Write no log.")
    with_text: bool = option(False, *SHOWN)("Write the requests' text to the log, too, not only token ids.")
    no_session: bool = option(False)("""Do not add X-Session-ID to requests: hits then come from the answers
        only.""")
    seconds: float = option(0.0, "S", min=0)("How long; 0: until Ctrl-C.")
    tokenizer: str = option("", "T")("""A folder, or a model's name in the local cache: it renders requests
        here. Default: the server does.""")
    events: Annotated[options.EventsAt, When("of one server", replica_header=False)] = None
    replica_header: str = option("", "NAME")("""URL is a router: the header of its answers that says which
        server gave them, such as x-envoy-upstream-host. The log has it as `replica`.""")
    header: options.Header = None
    insecure: options.Insecure = False
    json: options.Json = False


def tap(query: TapQuery) -> int:
    """Relay requests to a vLLM server, and say of each what it hit and what it differs in. Bytes pass as they are."""
    import sys
    from secrets import token_hex

    from kvtune.base.masking import held
    from kvtune.servers.tap.command import address, header_name, log_path, run
    from kvtune.servers.tap.messages import Settings
    from kvtune.servers.watch.client import base_of, headers_of

    listen, replica_header = address(query.listen), header_name(query.replica_header)
    settings = Settings(
        base_of(query.url),
        headers_of(query.header or []),
        query.insecure,
        f"kvtune-{token_hex(2)}-",
        "" if query.no_log else str(log_path(query.log)),
        query.with_text,
        query.json,
        query.tokenizer,
        list(query.events or ()),
        held().values,
        routed=bool(replica_header),
    )
    run(
        settings,
        listen,
        query.seconds,
        lambda text: print(text, file=sys.stderr, flush=True),
        add_session=not query.no_session,
        replica_header=replica_header,
    )
    return 0
