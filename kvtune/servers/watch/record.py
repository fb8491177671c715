"""Records a running server's counters and events as a run (`source = "server"`).

In: a `Watching`, and a log of the requests that were sent during the recording. Out: a `Run`, for `kvtune record`.
With a log each missed token of each request has a cause. Without one only the server's totals are divided by cause.
"""

from __future__ import annotations

import datetime
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs

from kvtune.base.clock import Clock
from kvtune.base.errors import KvtuneError, UsageError
from kvtune.base.legal import Value
from kvtune.data.knobs import CORE, CoreSettings
from kvtune.data.run.extras import Extras, ServerAccount, ServerPart
from kvtune.data.run.machine import origin
from kvtune.data.run.types import CoreInfo, EngineInfo, Header, Run, Table, Validity, WorkloadInfo, table_of
from kvtune.data.tally import Tally
from kvtune.requests.loads.identity import work_hash
from kvtune.requests.loads.requests_file import draft, within
from kvtune.requests.log.logged import Logged
from kvtune.requests.log.requests_log import NO_CLASS
from kvtune.servers.watch.cache import Cache
from kvtune.servers.watch.events import Received
from kvtune.servers.watch.metrics import SERVED
from kvtune.servers.watch.requests import join
from kvtune.servers.watch.timeline import Timeline
from kvtune.servers.watch.watching import Life, Snapshot, Watching

LOOK_S = 0.5
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


Allowed = Callable[[Sequence[str]], tuple[list[str], list[str]]]
"""Returns the flags that a run file may hold, and the names of the others."""


class Repeated(ABC):
    """What looks again and again."""

    clock: Clock
    looks: list[Any]

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def look(self) -> None: ...

    def run(
        self, seconds: float, goes_on: Callable[[float], bool], save: Callable[[], None] | None = None
    ) -> None:
        """Look again and again for `seconds`, or until `goes_on(seconds so far)` returns False.

        `save` is called every 5 s, to keep what was seen so far.
        """
        if not self.looks:
            self.start()
        begun, due = self.clock.now(), 0.0
        while (passed := self.clock.now() - begun) < seconds and goes_on(passed):
            if save is not None and passed >= due:
                save()
                due = self.clock.now() - begun + SAVE_S
            self.clock.sleep(min(LOOK_S, max(0.0, seconds - passed)))
            self.look()


@dataclass
class Recording(Repeated):
    """The looks, each with its seconds since `begun`, and all event batches, those of the server's history included.

    `lost`: the error of the last look, or "". `longest`: the server's max_model_len.
    """

    watching: Watching
    joins: bool = True
    """Whether the batches are kept, to join a log with them."""
    batches: list[Received] = field(default_factory=list)
    looks: list[tuple[float, Snapshot]] = field(default_factory=list)
    begun: float = 0.0
    lost: str = ""
    longest: int = 0
    resets: int = 0
    """How often the cache had been reset before."""
    fresh: bool = False
    """Whether the server had computed no prompt when it began."""
    timeline: Timeline = field(default_factory=Timeline)
    clock: Clock = field(default_factory=Clock)

    def start(self) -> None:
        """Read the server's history of events, and look for the first time."""
        self.watching.keep = self.batches if self.joins else None
        self.watching.start()
        self.take(time.time(), self.watching.look())

    def take(self, begun: float, shot: Snapshot) -> None:
        """Begin with the first look's snapshot."""
        self.longest = self.watching.server.longest()
        self.begun = begun
        self.keep(shot)
        self.watching.begin_lists()
        self.resets = self.watching.account.resets
        self.fresh = self.watching.last[0].get("prefix_cache_queries") == 0

    def look(self) -> None:
        """Look once more. A look that fails is lost, and the recording goes on."""
        try:
            self.keep(self.watching.look())
            self.lost = ""
        except KvtuneError as error:
            self.lost = error.message
            self.timeline.lose()

    def keep(self, shot: Snapshot) -> None:
        self.timeline.add(*self.watching.last, shot.restarts)
        if self.looks:  # only the last look's lists are of use, and hours of them would fill the memory
            at, before = self.looks[-1]
            self.looks[-1] = (at, structs.replace(before, prefixes=[], divergences=[], notes=[]))
        self.looks.append((shot.at - self.begun, shot))


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
    others: labels are the server's words.
    """
    last = recording.looks[-1][1]
    begun, end = round(recording.begun, 3), round(recording.begun + recording.looks[-1][0], 3)
    kept_until = recording.watching.kept_until
    rows = within_recording(log, logged, begun, end if kept_until is None else min(end, kept_until))
    lives = [*recording.watching.ended, recording.watching.life()]
    loaded = sum(life.period.loaded_tokens for life in lives)
    unit, told = recording.watching.match_unit, recording.watching.totals.told
    heard = last.events.state == "on" and told and not unit
    by_events = bool(recording.batches) and (
        heard or not (not told or unit or all(row.hit >= 0 for row in rows))
    )
    answered = join(
        recording.batches if by_events else (),
        rows,
        Cache(last.events.complete) if by_events else None,
        size=unit or recording.watching.block or last.block_size or 1,
        restarts=() if by_events else [life.ended for life in lives[:-1]],
        whole=recording.fresh,
    )
    by_line = {one.asked.line: one.tally for one in answered if one.tally is not None}
    reported = [one for one in answered if heard and one.asked.hit >= 0]
    server = ServerAccount(
        vllm=last.vllm,
        seconds=end - recording.begun,
        events=last.events.state,
        complete=last.events.complete,
        **structs.asdict(Tally.sum(life.period for life in lives)),
        recomputed_tokens=sum(life.period.recomputed for life in lives),
        evicted_blocks=sum(life.evicted_blocks for life in lives),
        preemptions=sum(life.preemptions for life in lives),
        restarts=last.restarts,
        resets=recording.watching.account.resets - recording.resets,
        requests=sum(life.requests for life in lives),
        loaded_tokens=loaded,
        parts=[_part(life, recording.begun) for life in lives] if len(lives) > 1 else [],
        logged=len(by_line),
        by_log=bool(not told or unit),
        reported=len(reported),
        agree=sum(one.exact for one in reported),
        prefixes=last.prefixes,
        divergences=last.divergences,
    )
    notes = [*last.notes]
    if recording.lost:
        notes.append(f"the server could not be reached at the end: {recording.lost}")
    if kept_until is not None and rows:
        notes.append(
            f"the log is joined up to {kept_until - recording.begun:.0f} s: later events did not fit in memory"
        )
    if server.reported != server.agree:
        notes.append(
            f"kvtune's account of {server.reported - server.agree} of {server.reported} requests differs from what the "
            "server reported: their hits are the server's, their causes what the log alone tells"
        )
    labels = recording.watching.cache
    blocks = (last.pool_blocks or 0) // max(1, last.engines)
    pool = {"num_gpu_blocks": str(blocks)} if blocks else {}
    args, others = allowed(_flags({**labels, **pool}, recording.longest))
    if others:
        notes.append(
            f"values of the server for {', '.join(others)} are not taken: a replay does not know them"
        )
    header = Header(
        **origin(command, recording.lost if ended else "the recording was killed"),
        source="server",
        started_at=datetime.datetime.fromtimestamp(recording.begun, datetime.UTC).isoformat(
            timespec="seconds"
        ),
        model=last.model,
        workload=describe_load(log, rows, begun, end),
        core=_core(recording.watching.core),
        engine=EngineInfo(
            vllm=last.vllm,
            block_size=last.block_size or 0,
            num_blocks=blocks,
            engines=last.engines,
            max_model_len=recording.longest,
            settings=_settings(labels),
            args=args,
            groups=[
                {"kind": group.kind, "block_size": group.block_size, "sliding_window": group.window}
                for blocks in list(recording.watching.account.blocks.values())[:1]
                for _, group in sorted(blocks.groups.items())
            ],
        ),
        valid=Validity(timings=True, why=""),
        wall_s=end - recording.begun,
        notes=notes,
        extra=Extras(server=server, misses=Tally.sum(by_line.values()).misses),
    )
    tables = {"server": _looks(recording), **recording.timeline.tables(recording.begun)}
    if rows:
        tables["requests"] = requests_table(rows, by_line, recording.begun)
    return Run(header, tables)


def _core(settings: Mapping[str, Value] | None) -> CoreInfo:
    """Return the core that the server runs, by its /metrics."""
    if settings is None:
        return CoreInfo(name="stock", why="a running server was watched")
    known = {name: value for name, value in settings.items() if name in CORE and CORE[name].is_legal(value)}
    return CoreInfo(name="kvtune", active=True, settings={**CoreSettings().to_dict(), **known})


def _flags(labels: dict[str, str], longest: int) -> list[str]:
    """Return the vLLM flags that give a replay the same pool and blocks."""
    said = {
        flag: labels[label]
        for label, flag in FLAGS.items()
        if labels.get(label, "None") not in ("None", "none", "") and not labels[label].startswith("-")
    }
    if longest:
        said["max-model-len"] = str(longest)
    return [word for flag, value in said.items() for word in (f"--{flag}", value)]


def _settings(labels: dict[str, str]) -> dict[str, object]:
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


def _looks(recording: Recording) -> Table:
    shots = recording.looks
    columns = {
        "t_s": np.array([t_s for t_s, _ in shots]),
        "running": np.array([shot.running or 0 for _, shot in shots]),
        "waiting": np.array([shot.waiting or 0 for _, shot in shots]),
        "pool_use": np.array([shot.pool_use or 0.0 for _, shot in shots]),
        "query_tokens": np.array([shot.query_tokens for _, shot in shots]),
        "hit_tokens": np.array([shot.hit_tokens for _, shot in shots]),
        "prompt_tokens": np.array([shot.prompt_tokens for _, shot in shots]),
        "output_tokens": np.array([shot.output_tokens for _, shot in shots]),
        "preemptions": np.array([shot.preemptions or 0 for _, shot in shots]),
        "evicted_blocks": np.array([shot.evicted_blocks for _, shot in shots]),
        **{column: np.array([shot.served.get(column, 0.0) for _, shot in shots]) for column in SERVED},
    }
    return table_of("server", columns)
