"""Old spellings of `kvtune explain` that this version still takes, each with a line that names the new one.

`explain -w requests:path=LOG` is `explain-log LOG`; `explain URL` is `record URL -o RUN`, then `explain RUN`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from kvtune.cli import options
from kvtune.cli.query import Query
from kvtune.commands import command
from kvtune.errors import UsageError
from kvtune.terminal import one_line

HIDDEN = ("explain-url",)
"""Commands that no list shows."""
LOG = ("-w", "--workload")


def rewritten(arguments: Sequence[str], commands: Mapping[str, Any]) -> list[str]:
    """Return a command line in today's spelling, and print the line about an old one."""
    if arguments[:1] != ["explain"]:
        return list(arguments)
    mine, of_log, of_server = (_options(commands[name]) for name in ("explain", "explain-log", "explain-url"))
    with_value = {name for known in (mine, of_log, of_server) for name, takes in known.items() if takes}
    spec, url, others = "", "", []
    words = iter(arguments[1:])
    for word in words:
        name, equals, value = word.partition("=")
        if name in LOG:
            spec = value if equals else next(words, "")
        elif word.startswith("-w"):
            spec = word.removeprefix("-w")
        elif word in with_value:
            others += [word, *[value for value in [next(words, None)] if value is not None]]
        elif not word.startswith("-") and is_address(word):
            url = word
        else:
            others.append(word)
    if spec:
        log = spec.removeprefix("requests:path=")
        _say("explain -w requests:path=LOG", command("explain-log", log))
        return ["explain-log", *others, log]
    if url:
        _say(
            "explain URL",
            f"{command('record', url, '-o', 'RUN')}, then kvtune explain RUN; live: kvtune watch",
        )
        return ["explain-url", url, *others]
    for word in (word.partition("=")[0] for word in others):
        if word not in mine and word in of_log:
            raise UsageError(f"{word} is for a log of requests", "it is an option of kvtune explain-log LOG")
        if word not in mine and word in of_server:
            raise UsageError(
                f"{word} is for a running server, and a run file is read as it is",
                "leave it out, or record the server with it: kvtune record URL -o RUN",
            )
    return list(arguments)


def _options(of: Any) -> dict[str, bool]:
    """Return a command's options, and whether each takes a value."""
    options = [parameter for parameter in of.params if parameter.param_type_name == "option"]
    return {name: not parameter.is_flag for parameter in options for name in parameter.opts}


def _say(old: str, new: str) -> None:
    print(one_line(f"`kvtune {old}` goes with kvtune 0.2: use {new}"), file=sys.stderr)


def is_address(text: str) -> bool:
    """Whether a word is a server's address and not a file."""
    host, colon, port = text.rpartition(":")
    plain = bool(colon and port.isdecimal() and host and "/" not in host)
    return "://" in text or (plain and not Path(text).exists())


@dataclass(frozen=True, kw_only=True)
class ExplainUrlQuery(Query):
    url: options.Url
    seconds: Annotated[
        float, typer.Option("--seconds", min=1, help="How long the server is recorded.", metavar="S")
    ] = 60.0
    requests: options.RequestsLog = None
    events: options.EventsAt = None
    listen: options.Listen = ""
    header: options.Header = None
    insecure: options.Insecure = False
    json: options.Json = False


def explain_url(query: ExplainUrlQuery) -> int:
    """Record a running server, and print where its prompt tokens went. It keeps no file."""
    from kvtune.cli import signals
    from kvtune.cli.explain import print_server
    from kvtune.cli.record import recorded_server, watching_of

    with signals.noted() as signalled:
        recorded, wrong = recorded_server(watching_of(query), query.seconds, query.requests, signalled)
    if wrong is not None:
        print(one_line(f"the log was left out: {wrong.message}"), file=sys.stderr)
    print_server(recorded, json=query.json)
    return 0
