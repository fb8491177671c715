"""Records several servers behind a router as one run: each server's recording, added up, and the funnel.

In: a `Fleet`, and a log whose requests name their `replica`, or whose session ids the servers' events have. Out: a
`Run`. With a log the funnel is that of its requests, too, and each session's loss.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
from msgspec import structs

from kvtune.base.clock import Clock
from kvtune.base.errors import UsageError
from kvtune.data.run.extras import Extras, RecordedFleet, ServerAccount
from kvtune.data.run.types import Run, Table
from kvtune.data.tally import Tally
from kvtune.requests.log.logged import Logged
from kvtune.servers.watch.blocks import FULL
from kvtune.servers.watch.cache import Cache
from kvtune.servers.watch.events import Stored
from kvtune.servers.watch.fleet import Fleet, FleetSnapshot
from kvtune.servers.watch.record import (
    Allowed,
    Recording,
    Repeated,
    describe_load,
    requests_table,
    run_of,
    within_recording,
)
from kvtune.servers.watch.replicas import assigned, funnel_of, regrets
from kvtune.servers.watch.requests import Answered, Served, join_fleet
from kvtune.servers.watch.timeline import Timeline, side_by_side

ADDED = (
    "recomputed_tokens",
    "evicted_blocks",
    "preemptions",
    "restarts",
    "resets",
    "requests",
    "loaded_tokens",
)
"""Fields of a server's account that are sums over servers."""


@dataclass
class FleetRecording(Repeated):
    """The recordings of a fleet's servers, and what it said of them all at the last look.

    `timeline`: of all servers, look by look. `lost`: never; servers are.
    """

    fleet: Fleet
    clock: Clock = field(default_factory=Clock)
    each: dict[str, Recording] = field(default_factory=dict)
    looks: list[tuple[float, FleetSnapshot]] = field(default_factory=list)
    begun: float = 0.0
    timeline: Timeline = field(default_factory=Timeline)

    def start(self) -> None:
        """Look for the first time at a fleet that was started."""
        self.begun = time.time()
        self.look()

    def look(self) -> None:
        last, shot = self.begun + self.looks[-1][0] if self.looks else self.begun, self.fleet.look()
        self.looks[:] = [(time.time() - self.begun, shot)]
        for url, member in self.fleet.members.items():
            if member.shot is None:
                continue
            if url not in self.each:
                self.each[url] = Recording(
                    member.watching, batches=[] if member.watching.keep is None else member.watching.keep
                )
                self.each[url].take(self.begun, member.shot)
            elif member.down_since is None:
                self.each[url].keep(member.shot)
            else:
                self.each[url].timeline.lose()
        rows = {url: self.each[url].timeline.newest for url in self.fleet.members if url in self.each}
        if came := {url: row for url, row in rows.items() if row is not None}:
            self.timeline.keep(side_by_side(came, last, self.begun + self.looks[-1][0]))


def fleet_run_of(
    recording: FleetRecording,
    log: Path | None,
    logged: Sequence[Logged],
    command: Sequence[str],
    allowed: Allowed,
    *,
    ended: bool = True,
) -> Run:
    """Make the run, as `run_of` does. Its engine is the first server's; the requests of a log have their `engine`."""
    seconds, shot = recording.looks[-1]
    urls = list(recording.each)
    runs = [run_of(one, None, [], command, allowed, ended=ended) for one in recording.each.values()]
    accounts = [run.header.extra.server or ServerAccount() for run in runs]
    kept = [one.watching.kept_until for one in recording.each.values() if one.watching.kept_until is not None]
    begun, end = round(recording.begun, 3), round(min([recording.begun + seconds, *kept]), 3)
    rows = within_recording(log, logged, begun, end)
    answered, places = _joined(recording, rows)
    left = places.count(-1)
    if rows and left == len(rows):
        raise UsageError(
            f"{log} does not say which server served its requests",
            f"give each line its `replica`, such as {urls[0]}, or a session_id that the server sees",
        )
    rows = [row for row, place in zip(rows, places, strict=True) if place >= 0]
    places = [place for place in places if place >= 0]
    known = [one for own in answered for one in own]
    compared = [member for member in recording.fleet.members.values() if member.model == shot.model]
    whole = all(member.whole and member.told for member in compared)
    remembered = not any(member.forgotten for member in compared)
    blocks, size = _pools(recording)
    notes = [f"{url}: {note}" for url, run in zip(urls, runs, strict=True) for note in run.header.notes]
    if left:
        notes.append(f"{left} requests of the log name no server that was recorded: they are left out")
    fleet = RecordedFleet(
        servers=shot.servers,
        funnel=shot.fleet,
        logged=funnel_of(known, blocks, size, whole=whole, remembered=remembered) if rows else None,
        sessions=regrets(known),
    )
    by_line = {one.asked.line: one.tally for one in known if one.tally is not None}
    server = ServerAccount(
        **structs.asdict(Tally.sum(accounts)),
        **{name: sum(getattr(one, name) for one in accounts) for name in ADDED},
        vllm=", ".join(sorted({one.vllm for one in accounts})),
        seconds=seconds,
        events="on" if all(one.events == "on" for one in accounts) else "off",
        complete=all(one.complete for one in accounts),
        logged=len(by_line),
        reported=sum(one.asked.hit >= 0 for one in known),
        agree=sum(one.exact for one in known),
        fleet=fleet,
    )
    header = structs.replace(
        runs[0].header,
        wall_s=seconds,
        model=shot.model,
        notes=[*shot.notes, *notes],
        workload=describe_load(log, rows, begun, end),
        engine=structs.replace(runs[0].header.engine, engines=sum(run.header.engine.engines for run in runs)),
        extra=Extras(server=server, misses=Tally.sum(by_line.values()).misses),
    )
    tables: dict[str, Table] = recording.timeline.tables(recording.begun)
    if rows:
        tables["requests"] = {**requests_table(rows, by_line, recording.begun), "engine": np.array(places)}
    return Run(header, tables)


def _joined(recording: FleetRecording, rows: Sequence[Logged]) -> tuple[list[list[Answered]], list[int]]:
    """Return each server's requests as they are judged, and which server served each row."""
    each = list(recording.each.items())
    batches = [[got.batch for got in one.batches] for _, one in each]
    stored = [[one for batch in own for one in batch.events if isinstance(one, Stored)] for own in batches]
    sessions = [{one.session_id or "" for one in own} for own in stored]
    names = [{url, urlsplit(url).netloc, str(n)} for n, (url, _) in enumerate(each)]
    places = assigned(rows, sessions, names)
    served = [
        Served(
            one.batches,
            [row for row, at in zip(rows, places, strict=True) if at == place],
            Cache(one.watching.events.complete) if one.batches else None,
            one.watching.block or one.watching.last[0].block_size or 1,
            [] if one.batches else [life.ended for life in one.watching.ended],
            one.fresh,
        )
        for place, (_, one) in enumerate(each)
    ]
    return join_fleet(served), places


def _pools(recording: FleetRecording) -> tuple[int, int]:
    """Return the blocks of all pools, and their size; 0 where one LRU cache of them has no meaning."""
    watchings = [one.watching for one in recording.each.values()]
    groups = {
        group
        for one in watchings
        for blocks in one.account.blocks.values()
        for group in blocks.groups.values()
    }
    scrapes = [one.last[0] for one in watchings]
    if len(groups) != 1 or any(group.kind != FULL or group.window for group in groups):
        return 0, 0
    blocks = sum((scrape.blocks or 0) - scrape.engines for scrape in scrapes)  # each engine keeps one back
    return max(0, blocks), next(iter(groups)).block_size
