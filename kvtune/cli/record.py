"""`kvtune record URL -o RUN`: records a running server to a run file for the other commands."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from kvtune.base.commands import command
from kvtune.base.errors import KvtuneError, UsageError
from kvtune.cli import options, signals
from kvtune.cli.query import Lab, Query, When, option

if TYPE_CHECKING:
    from kvtune.base.clock import Clock
    from kvtune.data.run.types import Run
    from kvtune.requests.log.bodies import Body, Rendered
    from kvtune.requests.log.logged import Logged
    from kvtune.servers.watch.addresses import Addresses
    from kvtune.servers.watch.endpoints import Named
    from kvtune.servers.watch.events import Received
    from kvtune.servers.watch.others import Others
    from kvtune.servers.watch.record import Recording
    from kvtune.servers.watch.server import Server

ENOUGH = 3
"""Signals after which the log is no longer read, but left out."""


@dataclass(frozen=True, kw_only=True)
class RecordQuery(Query):
    FACTS = {"of": {"one": "one server", "several": "several servers"}}

    urls: options.Urls = None
    urls_file: options.UrlsFile = None
    output: Path = option(MISSING, "-o,--output RUN", parser=options.new_run_path)("""The run
        file to write; it must be new.""")
    seconds: float = option(60.0, "S", min=1)("How long; Ctrl-C ends it before and writes the file.")
    requests: options.RequestsLog = None
    events: options.EventsAt = None
    listen: Annotated[options.Listen, When("for the events of one server", of="one")] = ""
    header: options.Header = None
    insecure: options.Insecure = False

    @property
    def partial(self) -> Path:
        """Where the recording so far is kept meanwhile. UsageError if the run file cannot be written."""
        from kvtune.data.run.file import SUFFIX

        if os.path.lexists(self.output):
            raise UsageError(f"{self.output} exists", "name a new file")
        folder = self.output.resolve().parent
        if not folder.is_dir():
            raise UsageError(f"there is no folder {folder}", "make it, or choose another file with -o")
        partial = self.output.with_name(f"{self.output.name.removesuffix(SUFFIX)}.partial{SUFFIX}")
        if partial.exists():
            raise UsageError(
                f"{partial} is left of a recording that was killed",
                f"{command('explain', str(partial))}, then move it",
            )
        return partial


def record(query: RecordQuery, lab: Lab) -> int:
    """Record a running vLLM server: hits, misses by cause, evictions. It sends no load and changes nothing."""
    from kvtune.data.run.file import write_run
    from kvtune.servers.watch.addresses import Addresses
    from kvtune.servers.watch.cache import rare_collections

    output, part = query.output, query.partial
    if not query.urls and query.urls_file is None:
        raise UsageError("record needs the URL of a running server", "kvtune record http://HOST:PORT -o RUN")
    addresses = Addresses(query.urls or [], query.urls_file, query.events or [], listen=query.listen)
    query.refuse(of="one" if addresses.only else "several")
    kept: list[bool] = []
    """Whether each attempt to write the run so far succeeded."""

    def save(run: Run) -> None:
        try:
            write_run(run, part, new=not any(kept))
            kept.append(True)
        except KvtuneError as error:
            if not kept or kept[-1]:
                print(f"a kill would lose the recording: {error.message}", file=sys.stderr)
            kept.append(False)

    with signals.noted() as signalled, rare_collections():
        run, wrong = _recorded(query, addresses, lab.clock(), signalled, save)
        written = _written(run, output, part)
        if any(kept):
            part.unlink(missing_ok=True)
    print(f"wrote {written}{' without its log' if wrong else ''}", file=sys.stderr)
    if wrong is not None:
        raise wrong
    print(f"  next: {command('explain', str(written))}", file=sys.stderr)
    return 0


def server_of(url: str, header: Sequence[str] | None, insecure: bool) -> Server:
    """Return the server at a URL, asked with these headers."""
    from kvtune.servers.watch.client import headers_of
    from kvtune.servers.watch.server import Server

    return Server(url, headers_of(header or []), insecure)


def _written(run: Run, output: Path, partial: Path) -> Path:
    """Write the run and return where: if `output` cannot be written, in the current or in the temporary folder."""
    from kvtune.data.run.file import write_run

    try:
        write_run(run, output, new=True)
        return output
    except KvtuneError as error:
        failed = error
    print(f"{failed.message}; trying other folders", file=sys.stderr)
    for folder in (Path.cwd(), Path(tempfile.gettempdir())):
        with contextlib.suppress(KvtuneError):
            write_run(run, folder / output.name, new=True)
            return folder / output.name
    left = f"; {partial} holds what was seen up to 5 s before" if partial.exists() else ""
    raise KvtuneError(f"{failed.message}{left}", failed.hint)


def _recorded(
    query: RecordQuery,
    addresses: Addresses,
    clock: Clock,
    signalled: list[str],
    save: Callable[[Run], None],
) -> tuple[Run, KvtuneError | None]:
    """Record the servers until the time is over or a signal comes. Return the run, and why its log could not be used.

    `save` gets the run so far every 5 s.
    """
    from kvtune.servers.watch.record import Recording
    from kvtune.servers.watch.servers import Servers
    from kvtune.servers.watch.watched import Room, Watched

    room = Room()

    def watcher(url: str, named: Named, others: Others | None) -> Watched:
        server = server_of(url, query.header, query.insecure)
        keep: list[Received] | None = [] if query.requests is not None else None
        return Watched(server, named, others, keep=keep, room=room)

    servers = Servers(addresses, watcher, history=False)
    try:
        return _recording(Recording(servers, clock), query, signalled, save)
    finally:
        servers.close()


def _recording(
    recording: Recording, query: RecordQuery, signalled: list[str], save: Callable[[Run], None]
) -> tuple[Run, KvtuneError | None]:
    from kvtune.data.file_flags import on_the_list
    from kvtune.data.show.terminal import redraw
    from kvtune.requests.log.requests_log import read_log
    from kvtune.servers.watch.record import run_of
    from kvtune.servers.watch.rendering import ServerRendering

    def told(passed: float) -> bool:
        if sys.stderr.isatty():
            redraw(f"recording: {passed:.0f} of {query.seconds:.0f} s; Ctrl-C ends it")
        return not signalled

    def rendered(bodies: Sequence[Body]) -> Iterator[Rendered | UsageError]:
        for rendered in ServerRendering(recording.only.watched.server).render(bodies):
            if len(signalled) >= ENOUGH:
                raise KvtuneError(f"and the rest was not read: {signalled[-1]}")
            yield rendered

    def made(log: Path | None = None, rows: Sequence[Logged] = (), *, ended: bool = True) -> Run:
        return run_of(recording, log, rows, ["kvtune", *sys.argv[1:]], on_the_list, ended=ended)

    if not sys.stderr.isatty():
        names = ", ".join(recording.servers.addresses.read())
        print(f"recording {names} for {query.seconds:.0f} s ..", file=sys.stderr)
    with signals.interruptible():
        recording.start()
    try:
        recording.run(query.seconds, told, lambda: save(made(ended=False)))
    finally:
        if sys.stderr.isatty():
            redraw("")
    if signalled:
        print(f"ended by {'Ctrl-C' if signalled[0] == 'SIGINT' else signalled[0]}", file=sys.stderr)
    if query.requests is None:
        return made(), None
    try:
        rows = []
        for row in read_log(query.requests, rendered):
            if len(signalled) >= ENOUGH:
                raise KvtuneError(f"the rest of {query.requests} was not read: {signalled[-1]}")
            rows.append(row)
        return made(query.requests, rows), None
    except KvtuneError as error:  # an unreadable log must not lose the recording
        return made(), error
