"""Records running servers' counters and events as a run (`source = "server"`), for `kvtune record`.

In: `Servers`, one or several, and a log of the requests that were sent during the recording. Out: a `Run`. With a log
each missed token of each request has a cause, and of several servers each session's loss is told: its requests name
their `replica`, or their session ids are those of the servers' events. Without one only the servers' totals are
divided by cause.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
from msgspec import structs

from kvtune.base.bounded import TooLongError, cpu_limit
from kvtune.base.clock import Clock
from kvtune.base.errors import KvtuneError, UsageError
from kvtune.base.legal import Value
from kvtune.data.knobs import CORE, CoreSettings
from kvtune.data.run.extras import Extras, RecordedFleet, ServerAccount, ServerPart
from kvtune.data.run.machine import origin
from kvtune.data.run.types import CoreInfo, EngineInfo, Header, Run, Table, Validity, WorkloadInfo, table_of
from kvtune.data.tally import Tally
from kvtune.requests.loads.identity import work_hash
from kvtune.requests.loads.requests_file import draft, within
from kvtune.requests.log.logged import Logged
from kvtune.requests.log.requests_log import NO_CLASS
from kvtune.servers.watch.blocks import FULL
from kvtune.servers.watch.cache import Cache
from kvtune.servers.watch.events import Received, Stored
from kvtune.servers.watch.metrics import SERVED
from kvtune.servers.watch.replicas import assigned, funnel_of, regrets
from kvtune.servers.watch.requests import Answered, Served, join_fleet
from kvtune.servers.watch.servers import FleetSnapshot, Servers
from kvtune.servers.watch.snapshot import Snapshot
from kvtune.servers.watch.timeline import Timeline, side_by_side
from kvtune.servers.watch.watched import Life, Watched

LOOK_S = 0.5
JOIN_S = 120.0
"""CPU time for joining a log with the events."""
SAVE_S = 4.0
"""Seconds between two times at which what was seen is kept: after 5 s it is on disk."""
FLAGS = {
    "block_size": "block-size",
    "num_gpu_blocks": "num-gpu-blocks-override",
    "prefix_cache_retention_interval": "prefix-cache-retention-interval",
    "mamba_cache_mode": "mamba-cache-mode",
    "mamba_block_size": "mamba-block-size",
    "prefix_match_unit": "prefix-match-unit",
    "kv_offloading_size": "kv-offloading-size",
}
"""Labels of cache_config_info that a replay needs -> the vLLM flags that set them."""
OF_SHOT = (
    "running",
    "waiting",
    "pool_use",
    "query_tokens",
    "hit_tokens",
    "prompt_tokens",
    "output_tokens",
    "preemptions",
    "evicted_blocks",
)
"""Fields of a snapshot that are columns of the table `server`."""
ADDED = (
    "recomputed_tokens",
    "evicted_blocks",
    "preemptions",
    "restarts",
    "resets",
    "requests",
    "loaded_tokens",
    "logged",
    "reported",
    "agree",
)
"""Fields of a server's account that are sums over servers."""


Allowed = Callable[[Sequence[str]], tuple[list[str], list[str]]]
"""Returns the flags that a run file may hold, and the names of the others."""


@dataclass
class Recorded:
    """One server of a recording. `longest`: its max_model_len. `resets`: of its cache, before the recording.

    `fresh`: it had computed no prompt when it was joined. `last`: its last snapshot. `rows`: of the table `server`.
    """

    watched: Watched
    last: Snapshot
    longest: int
    resets: int
    fresh: bool
    timeline: Timeline = field(default_factory=Timeline)
    rows: list[list[float]] = field(default_factory=list)

    @classmethod
    def begin(cls, watched: Watched, shot: Snapshot) -> Recorded:
        """Begin with a server's first look. Its lists of prefixes and of differences begin now."""
        watched.begin_lists()
        fresh = watched.scrape.get("prefix_cache_queries") == 0
        return cls(watched, shot, watched.server.longest(), watched.account.resets, fresh)

    def keep(self, shot: Snapshot, t_s: float) -> None:
        self.last = shot
        self.timeline.add(*self.watched.last, shot.restarts)
        now = [getattr(shot, name) or 0 for name in OF_SHOT]
        self.rows.append([t_s, *now, *(shot.served.get(name, 0.0) for name in SERVED)])

    @property
    def batches(self) -> list[Received]:
        return self.watched.keep or []

    @property
    def heard(self) -> bool:
        return self.watched.told and self.last.events.state == "on"

    @property
    def lives(self) -> list[Life]:
        return [*self.watched.ended, self.watched.life()]

    def served(self, rows: Sequence[Logged]) -> Served:
        """Return these requests of a log with the server's events, or without where these do not tell causes."""
        size = self.watched.scrape.match_unit or self.watched.account.block_size or self.last.block_size or 1
        if self.batches and self.watched.told and (self.heard or any(row.hit < 0 for row in rows)):
            return Served(self.batches, rows, Cache(self.last.events.complete), size, (), self.fresh)
        restarts = [life.ended for life in self.watched.ended]
        return Served((), rows, None, size, restarts, self.fresh)

    def account(self, begun: float, seconds: float, answered: Sequence[Answered]) -> ServerAccount:
        """Return its counts since `begun`, with the requests of a log that it answered."""
        reported = [answer for answer in answered if self.heard and answer.asked.hit >= 0]
        lives, last = self.lives, self.last
        return ServerAccount(
            vllm=last.vllm,
            seconds=seconds,
            events=last.events.state,
            complete=last.events.complete,
            **structs.asdict(Tally.sum(life.period for life in lives)),
            recomputed_tokens=sum(life.period.recomputed for life in lives),
            evicted_blocks=sum(life.evicted_blocks for life in lives),
            preemptions=sum(life.preemptions for life in lives),
            restarts=last.restarts,
            resets=self.watched.account.resets - self.resets,
            requests=sum(life.requests for life in lives),
            loaded_tokens=sum(life.period.loaded_tokens for life in lives),
            parts=[_part(life, begun) for life in lives] if len(lives) > 1 else [],
            logged=sum(answer.tally is not None for answer in answered),
            by_log=not self.watched.told,
            reported=len(reported),
            agree=sum(answer.exact for answer in reported),
            prefixes=last.prefixes,
            divergences=last.divergences,
        )

    def engine(self, allowed: Allowed) -> tuple[EngineInfo, list[str]]:
        """Return what is known of its engine, and the names of values that a replay does not know."""
        last, labels = self.last, self.watched.scrape.cache
        blocks = (last.pool_blocks or 0) // max(1, last.engines)
        pool = {"num_gpu_blocks": str(blocks)} if blocks else {}
        args, others = allowed(_flags({**labels, **pool}, self.longest))
        groups = next((each.groups for each in self.watched.account.blocks.values()), {})
        return EngineInfo(
            vllm=last.vllm,
            block_size=last.block_size or 0,
            num_blocks=blocks,
            engines=last.engines,
            max_model_len=self.longest,
            settings=_settings(labels),
            args=args,
            groups=[
                {"kind": group.kind, "block_size": group.block_size, "sliding_window": group.window}
                for _, group in sorted(groups.items())
            ],
        ), others


@dataclass
class Recording:
    """The looks at a list of servers, and all event batches, those of the servers' histories included.

    `begun`: when it began; `seconds`: from then to the last look, which saw `shot`. `lost`: the error of a look after
    it, or "". `timeline`: of all servers, look by look.
    """

    servers: Servers
    clock: Clock = field(default_factory=Clock)
    each: dict[str, Recorded] = field(default_factory=dict)
    shot: Snapshot | FleetSnapshot | None = None
    begun: float = 0.0
    seconds: float = 0.0
    lost: str = ""
    timeline: Timeline = field(default_factory=Timeline)

    @property
    def only(self) -> Recorded:
        """The first server; the only one of a list of one."""
        return next(iter(self.each.values()))

    def start(self) -> None:
        """Read the servers' histories of events, and look for the first time."""
        self.servers.start()
        self.begun = time.time()
        self._keep(self.servers.look())

    def look(self) -> None:
        """Look once more. A look that fails is lost, and the recording goes on."""
        try:
            shot = self.servers.look()
        except KvtuneError as error:
            self.lost = error.message
            for recorded in self.each.values():
                recorded.timeline.lose()
            return
        self.lost = ""
        self._keep(shot)

    def _keep(self, shot: Snapshot | FleetSnapshot) -> None:
        before, self.shot, self.seconds = self.seconds, shot, shot.at - self.begun
        for url, member in self.servers.members.items():
            if member.shot is None:
                continue
            if url not in self.each:
                self.each[url] = Recorded.begin(member.watched, member.shot)
            if member.down_since is None:
                self.each[url].keep(member.shot, self.seconds)
            else:
                self.each[url].timeline.lose()
        rows = {url: self.each[url].timeline.newest for url in self.servers.members if url in self.each}
        if came := {url: row for url, row in rows.items() if row is not None}:
            self.timeline.keep(side_by_side(came, self.begun + before, self.begun + self.seconds))

    def run(
        self, seconds: float, goes_on: Callable[[float], bool], save: Callable[[], None] | None = None
    ) -> None:
        """Look again and again for `seconds`, or until `goes_on(seconds so far)` returns False.

        `save` is called every 5 s, to keep what was seen so far.
        """
        if not self.each:
            self.start()
        begun, due = self.clock.now(), 0.0
        while (passed := self.clock.now() - begun) < seconds and goes_on(passed):
            if save is not None and passed >= due:
                save()
                due = self.clock.now() - begun + SAVE_S
            self.clock.sleep(min(LOOK_S, max(0.0, seconds - passed)))
            self.look()


def run_of(
    recording: Recording,
    log: Path | None,
    logged: Sequence[Logged],
    command: Sequence[str],
    allowed: Allowed,
    *,
    ended: bool = True,
) -> Run:
    """Make the run. `logged`: the log's requests; those not sent and answered during the recording are left out.

    `ended`: whether the recording is over. `allowed` returns the flags that a run file may hold, and the names of the
    others: labels are the server's words. The engine of several servers is the first one's.
    """
    each, shot = list(recording.each.values()), recording.shot
    assert shot is not None
    begun, end = round(recording.begun, 3), round(recording.begun + recording.seconds, 3)
    kept = [recorded.watched.kept_until for recorded in each if recorded.watched.kept_until is not None]
    rows, places, left = _placed(recording, within_recording(log, logged, begun, min([end, *kept])), log)
    own = [
        [row for row, served_by in zip(rows, places, strict=True) if served_by == n] for n in range(len(each))
    ]
    try:
        with cpu_limit(JOIN_S):
            answered = join_fleet([recorded.served(rows) for recorded, rows in zip(each, own, strict=True)])
    except (TooLongError, ValueError) as error:
        raise KvtuneError(
            f"the log cannot be joined with the events: {error}", "record a shorter time"
        ) from None
    by_line = {
        recorded.asked.line: recorded.tally
        for rows in answered
        for recorded in rows
        if recorded.tally is not None
    }
    since, wall_s = recording.begun, end - recording.begun
    accounts = [recorded.account(since, wall_s, rows) for recorded, rows in zip(each, answered, strict=True)]
    server, (engine, _) = accounts[0], each[0].engine(allowed)
    notes_of = [
        _notes(recorded, recording, account, allowed, bool(rows))
        for recorded, account in zip(each, accounts, strict=True)
    ]
    notes = notes_of[0]
    if isinstance(shot, FleetSnapshot):
        server = _added(accounts, _fleet(recording, shot, answered))
        engine = structs.replace(engine, engines=sum(recorded.last.engines for recorded in each))
        named = zip(recording.each, notes_of, strict=True)
        notes = [*shot.notes, *(f"{url}: {note}" for url, notes in named for note in notes)]
    if left:
        notes.append(f"{left} requests of the log name no server that was recorded: they are left out")
    header = Header(
        **origin(command, recording.lost if ended else "the recording was killed"),
        source="server",
        started_at=datetime.datetime.fromtimestamp(since, datetime.UTC).isoformat(timespec="seconds"),
        model=shot.model,
        workload=describe_load(log, rows, begun, end),
        core=_core(each[0].watched.scrape.core),
        engine=engine,
        valid=Validity(timings=True, why=""),
        wall_s=wall_s,
        notes=notes,
        extra=Extras(server=server, misses=Tally.sum(by_line.values()).misses),
    )
    return Run(header, _tables(recording, rows, places, by_line))


def _tables(
    recording: Recording, rows: Sequence[Logged], places: Sequence[int], by_line: Mapping[int, Tally]
) -> dict[str, Table]:
    tables: dict[str, Table] = recording.timeline.tables(recording.begun)
    several = isinstance(recording.shot, FleetSnapshot)
    if not several:
        columns = zip(("t_s", *OF_SHOT, *SERVED), zip(*recording.only.rows, strict=True), strict=True)
        tables["server"] = table_of("server", {name: np.array(values) for name, values in columns})
    if rows:
        tables["requests"] = requests_table(rows, by_line, recording.begun)
        if several:
            tables["requests"]["engine"] = np.array(places)
    return tables


def _notes(
    recorded: Recorded, recording: Recording, account: ServerAccount, allowed: Allowed, joined: bool
) -> list[str]:
    notes, kept_until = [*recorded.last.notes], recorded.watched.kept_until
    if recording.lost:
        notes.append(f"the server could not be reached at the end: {recording.lost}")
    if kept_until is not None and joined:
        notes.append(
            f"the log is joined up to {kept_until - recording.begun:.0f} s: later events did not fit in memory"
        )
    if account.reported != account.agree:
        notes.append(
            f"kvtune's account of {account.reported - account.agree} of {account.reported} requests differs from what "
            "the server reported: their hits are the server's, their causes what the log alone tells"
        )
    if others := recorded.engine(allowed)[1]:
        notes.append(
            f"values of the server for {', '.join(others)} are not taken: a replay does not know them"
        )
    return notes


def _placed(
    recording: Recording, rows: Sequence[Logged], log: Path | None
) -> tuple[list[Logged], list[int], int]:
    """Return the rows whose server is known, which one it is of each, and how many others there are."""
    if not isinstance(recording.shot, FleetSnapshot):
        return [*rows], [0] * len(rows), 0
    urls = list(recording.each)
    stored = [
        {
            event.session_id or ""
            for got in recorded.batches
            for event in got.batch.events
            if isinstance(event, Stored)
        }
        for recorded in recording.each.values()
    ]
    names = [{url, urlsplit(url).netloc, str(n)} for n, url in enumerate(urls)]
    places = assigned(rows, stored, names)
    placed = [(row, place) for row, place in zip(rows, places, strict=True) if place >= 0]
    if rows and not placed:
        raise UsageError(
            f"{log} does not say which server served its requests",
            f"give each line its `replica`, such as {urls[0]}, or a session_id that the server sees",
        )
    return [row for row, _ in placed], [place for _, place in placed], len(rows) - len(placed)


def _added(accounts: Sequence[ServerAccount], fleet: RecordedFleet) -> ServerAccount:
    """Return the account of several servers."""
    return ServerAccount(
        **structs.asdict(Tally.sum(accounts)),
        **{name: sum(getattr(account, name) for account in accounts) for name in ADDED},
        vllm=", ".join(sorted({account.vllm for account in accounts})),
        seconds=accounts[0].seconds,
        events="on" if all(account.events == "on" for account in accounts) else "off",
        complete=all(account.complete for account in accounts),
        fleet=fleet,
    )


def _fleet(
    recording: Recording, shot: FleetSnapshot, answered: Sequence[Sequence[Answered]]
) -> RecordedFleet:
    requests = [each for own in answered for each in own]
    compared = [member for member in recording.servers.members.values() if member.model == shot.model]
    blocks, size = _pools([each.watched for each in recording.each.values()])
    logged = funnel_of(
        requests,
        blocks,
        size,
        whole=all(member.whole and member.told for member in compared),
        remembered=not any(member.watched.account.forgotten for member in compared),
    )
    return RecordedFleet(
        servers=shot.servers,
        funnel=shot.fleet,
        logged=logged if requests else None,
        sessions=regrets(requests),
    )


def _pools(servers: Sequence[Watched]) -> tuple[int, int]:
    """Return the blocks of all pools, and their size; 0 where one LRU cache of them has no meaning."""
    ranks = [blocks for watched in servers for blocks in watched.account.blocks.values()]
    groups = {group for blocks in ranks for group in blocks.groups.values()}
    if len(groups) != 1 or any(group.kind != FULL or group.window for group in groups):
        return 0, 0
    scrapes = [watched.scrape for watched in servers]
    blocks = sum((scrape.blocks or 0) - scrape.engines for scrape in scrapes)  # each engine keeps one back
    return max(0, blocks), next(iter(groups)).block_size


def _core(settings: Mapping[str, Value] | None) -> CoreInfo:
    """Return the core that the server runs, by its /metrics."""
    if settings is None:
        return CoreInfo(name="stock", why="a running server was watched")
    legal = {name: value for name, value in settings.items() if name in CORE and CORE[name].is_legal(value)}
    return CoreInfo(name="kvtune", active=True, settings={**CoreSettings().to_dict(), **legal})


def _flags(labels: dict[str, str], longest: int) -> list[str]:
    """Return the vLLM flags that give a replay the same pool and blocks."""
    flags = {
        flag: labels[label]
        for label, flag in FLAGS.items()
        if labels.get(label, "None") not in ("None", "none", "") and not labels[label].startswith("-")
    }
    if longest:
        flags["max-model-len"] = str(longest)
    return [word for flag, value in flags.items() for word in (f"--{flag}", value)]


def _settings(labels: Mapping[str, str]) -> dict[str, object]:
    settings: dict[str, object] = {
        "enable_prefix_caching": labels.get("enable_prefix_caching", "True") == "True",
        "prefix_caching_hash_algo": labels.get("prefix_caching_hash_algo", ""),
    }
    if (interval := labels.get("prefix_cache_retention_interval", "")).isdecimal():
        settings["retention_interval"] = int(interval)
    return settings


def within_recording(log: Path | None, logged: Sequence[Logged], begun: float, end: float) -> list[Logged]:
    """Return the requests that were sent and answered during the recording.

    UsageError if there are none, or if the log lacks the times of a request.
    """
    if log is None:
        return []
    rows = []
    for row in logged:
        if row.t0 is None or row.t1 is None:
            raise UsageError(
                f"{log}, line {row.line} does not say when the request was sent and answered",
                "give each line `t0` and `t1`, seconds since 1970",
            )
        if within(row, begun, end):
            rows.append(row)
    if not rows:
        raise UsageError(
            f"{log} has no request that was sent and answered during the recording",
            "its times are seconds since 1970, by a clock like this machine's",
        )
    return sorted(rows, key=lambda row: row.t0 or 0.0)


def describe_load(log: Path | None, rows: list[Logged], begun: float, end: float) -> WorkloadInfo:
    if log is None or not rows:
        return WorkloadInfo(name="server", spec="", params={}, seed=0, hash="", requests=0)
    plan = draft(rows)
    return WorkloadInfo(
        name="requests",
        spec=f"requests:path={log},since={begun},until={end}",
        params={"path": str(log), "since": begun, "until": end},
        seed=0,
        hash=work_hash(plan, 0),
        requests=len(rows),
    )


def _part(life: Life, begun: float) -> ServerPart:
    period = life.period
    return ServerPart(
        begin_s=max(0.0, life.begun - begun),
        end_s=life.ended - begun,
        query_tokens=period.query_tokens,
        hit_tokens=period.hit_tokens,
        misses=period.misses,
        loaded_tokens=period.loaded_tokens,
    )


def requests_table(rows: Sequence[Logged], by_line: Mapping[int, Tally], begun: float) -> Table:
    got = [by_line.get(row.line) for row in rows]
    hits = [tally.hit_tokens if tally is not None else row.hit for tally, row in zip(got, rows, strict=True)]
    count = len(rows)
    nothing = np.full(count, np.nan)
    columns = {
        "id": np.array([row.name for row in rows]),
        "kind": np.array([row.kind or NO_CLASS for row in rows]),
        "round": np.full(count, -1),
        "prompt_tokens": np.array([len(row.prompt) for row in rows]),
        "output_tokens": np.array([row.output_tokens for row in rows]),
        "hit_tokens": np.array(hits),
        "planned_s": nothing,
        "sent_s": np.array([(row.t0 or 0.0) - begun for row in rows]),
        "first_token_s": np.array([(row.t0 or 0.0) - begun + (row.ttft or np.nan) for row in rows]),
        "finished_s": np.array([(row.t1 or 0.0) - begun for row in rows]),
        "finish": np.array(["length"] * count),
    }
    return table_of("requests", columns)
