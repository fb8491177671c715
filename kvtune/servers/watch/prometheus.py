"""Says what bounded the servers of a Prometheus job in the last hour: the same judgement as of a watched server.

In: `query_range` of Prometheus' HTTP API: the names of the job's instances, then the series of each of them.
Out: an `Hour`. The hour is cut into slices; of each slice the samples are judged as looks. Nothing else is asked.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, pairwise
from typing import Annotated
from urllib.parse import urlencode

import msgspec
from msgspec import Meta

from kvtune.base.bounded import cpu_limit
from kvtune.base.commands import command
from kvtune.base.errors import KvtuneError
from kvtune.base.units import count, percent
from kvtune.data.run.signature import identity
from kvtune.data.show.parts import Document, Section, grid
from kvtune.data.show.terminal import Column, one_line
from kvtune.data.tally import Hits
from kvtune.servers.watch.client import Client, StatusError
from kvtune.servers.watch.document import regime_section
from kvtune.servers.watch.metrics import (
    LABELS_OF_CACHE,
    PREFIX,
    UNREADABLE,
    Between,
    Scrape,
    begun_anew,
    scrape_of,
)
from kvtune.servers.watch.regime import Finding, Limits, finding

HOUR_S, STEP_S, SLICE_S = 3600.0, 15.0, 300.0
"""Seconds that are asked for, between two samples, and that are judged at once."""
ANSWER_S, WHOLE_S = 30.0, 60.0
"""Seconds that Prometheus has for an answer, and for all: what has not come then is not asked for."""
JUDGE_CPU_S = 5.0
"""CPU time for one instance's hour."""
MOST_INSTANCES = 100
MOST_SAMPLES, MOST_SERIES = 500, 5_000
"""Most samples of a series, of which there are 241, and series of an answer: those of 100 engines take half."""
MOST_NAMED = 16
"""Instances that a command names."""
ADDRESS = re.compile(r"[\w.-]{1,200}:\d{1,5}|\[[0-9a-fA-F:]{2,40}\]:\d{1,5}")
PATH = "/api/v1/query_range"
ALIVE = "num_requests_running"
SERIES = (
    *(
        "num_requests_running",
        "num_requests_waiting",
        "num_requests_waiting_by_reason",
        "kv_cache_usage_perc",
    ),
    *("num_preemptions_total", "generation_tokens_total", "prompt_tokens_total"),
    *("prefix_cache_queries_total", "prefix_cache_hits_total", "time_to_first_token_seconds_count"),
    *("external_prefix_cache_hits_total", "iteration_tokens_total_sum", "iteration_tokens_total_count"),
    *("e2e_request_latency_seconds_sum", "e2e_request_latency_seconds_count"),
    *("request_queue_time_seconds_sum", "request_inference_time_seconds_sum", LABELS_OF_CACHE),
)

Labels = dict[Annotated[str, Meta(max_length=300)], Annotated[str, Meta(max_length=1000)]]


class _Series(msgspec.Struct):
    metric: Labels = {}
    values: Annotated[
        list[tuple[float, Annotated[str, Meta(max_length=100)]]], Meta(max_length=MOST_SAMPLES)
    ] = []


class _Data(msgspec.Struct):
    result: Annotated[list[_Series], Meta(max_length=MOST_SERIES)] = []


class _Answer(msgspec.Struct):
    data: _Data = msgspec.field(default_factory=_Data)


class Slice(msgspec.Struct, frozen=True):
    """What bounded an instance from `at` on, for SLICE_S seconds. None: fewer than two samples, or a restart."""

    at: float
    regime: str | None


class Instance(Hits, frozen=True, kw_only=True):
    """One server's hour. `seconds` by regime; `longest`: the finding of the last slice with the regime named most."""

    instance: str
    model: str
    engines: int
    seconds: dict[str, float]
    slices: list[Slice]
    longest: Finding | None
    preemptions: int

    @property
    def most(self) -> str:
        return most_named(self.seconds)


class Hour(msgspec.Struct, frozen=True):
    """What bounded the servers of a job in the hour up to `at`."""

    prometheus: str
    job: str
    at: float
    instances: list[Instance]
    notes: list[str] = []


def read_hour(client: Client, job: str, now: float, limits: Limits) -> Hour:
    """Ask for the hour before `now`. KvtuneError if Prometheus has nothing of the job, or answers anything else."""
    now = float(int(now))  # Prometheus counts milliseconds: samples lie at the ends of slices
    quoted = json.dumps(job, ensure_ascii=False)
    alive = _asked(client, f"group by (instance) ({PREFIX}{ALIVE}{{job={quoted}}})", now, HOUR_S)
    names = sorted({series.metric.get("instance", "") for series in alive})
    if not names:
        raise KvtuneError(
            f"{client.base} has no {PREFIX}{ALIVE} of job {one_line(job)!r} in the last hour",
            "name the job as Prometheus' configuration does: --job NAME",
        )
    notes = []
    if len(names) > MOST_INSTANCES:
        notes.append(f"{len(names) - MOST_INSTANCES} more instances were not asked for")
    series = "|".join(map(re.escape, SERIES))
    asked = names[:MOST_INSTANCES]

    def path_of(name: str) -> str:
        where = f'job={quoted},instance={json.dumps(name, ensure_ascii=False)},__name__=~"{PREFIX}({series})"'
        return _path(f"{{{where}}}", now, STEP_S)

    def judged(place: int, answer: bytes) -> Instance:
        made = client.read(answer, PATH, _Answer).data.result
        return instance_of(asked[place], _scrapes(client, made), now, limits)

    answers = client.ask_all([*map(path_of, asked)], judged, seconds=ANSWER_S, whole_s=WHOLE_S)
    instances = [answer for answer in answers if isinstance(answer, Instance)]
    failed = {name: each for name, each in zip(asked, answers, strict=True) if isinstance(each, KvtuneError)}
    for name, error in islice(failed.items(), 1):
        if not instances:
            raise error
        first = f"the first, {one_line(name)}: {error.message}"
        notes.append(f"of {len(failed)} instances nothing is known; {first}")
    return Hour(client.base, job, now, instances, notes)


def instance_of(name: str, scrapes: Sequence[Scrape], now: float, limits: Limits) -> Instance:
    slices, findings = [], []
    for number in range(round(HOUR_S / SLICE_S)):
        begin = now - HOUR_S + number * SLICE_S
        part = [scrape for scrape in scrapes if begin <= scrape.at < begin + SLICE_S]
        restarted = any(begun_anew(*pair) for pair in pairwise(part))
        judged = None if restarted else finding(part, limits)
        findings += [] if judged is None else [judged]
        slices.append(Slice(begin, judged.regime if judged is not None else None))
    seconds: Counter[str] = Counter()
    for each in findings:
        seconds[each.regime] += each.seconds  # type: ignore[assignment]
    named = most_named(seconds)
    pairs = [Between(*pair) for pair in pairwise(scrapes)]

    def counted(series: str) -> int:
        """Over restarts, too: a counter that fell counts from 0."""
        falls = ((pair.last.get(series) or 0.0, pair.first.get(series) or 0.0) for pair in pairs)
        return int(sum(last - first if last >= first else last for last, first in falls))

    return Instance(
        instance=one_line(name),
        model=scrapes[-1].model if scrapes else "",
        engines=scrapes[-1].engines if scrapes else 0,
        seconds=dict(seconds),
        slices=slices,
        longest=next((each for each in reversed(findings) if each.regime == named), None),
        query_tokens=counted("prefix_cache_queries"),
        hit_tokens=counted("prefix_cache_hits") + counted("external_prefix_cache_hits"),
        preemptions=counted("num_preemptions"),
    )


def most_named(seconds: Mapping[str, float]) -> str:
    """Return the regime of most seconds; "" if nothing was judged."""
    return max(seconds, key=lambda regime: seconds[regime], default="")


def _scrapes(client: Client, answer: Sequence[_Series]) -> list[Scrape]:
    """Return one scrape for each time at which the instance was scraped."""
    samples: dict[float, list[tuple[str, Mapping[str, str], float]]] = {}
    for series in answer:
        labels = dict(series.metric)
        name = labels.pop("__name__", "")
        for time_s, text in series.values:
            samples.setdefault(time_s, []).append((name, labels, _number(client, text)))
    if len(samples) > MOST_SAMPLES:
        raise KvtuneError(f"{client.base} has samples of {count(len(samples))} times", "is it Prometheus?")
    try:
        with cpu_limit(JUDGE_CPU_S):
            made = [scrape_of(samples[time_s], time_s) for time_s in sorted(samples)]
    except UNREADABLE as error:
        raise KvtuneError(
            f"{client.base} has values that no server has: {one_line(str(error))[:200]}", "is it vLLM's?"
        ) from None
    return [scrape for scrape in made if scrape.get(ALIVE) is not None]


def _number(client: Client, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise KvtuneError(
            f"{client.base} has a value that is no number: {one_line(text)[:40]!r}", "is it Prometheus?"
        ) from None


def _path(query: str, now: float, step: float) -> str:
    words = {"query": query, "start": f"{now - HOUR_S:.3f}", "end": f"{now:.3f}", "step": f"{step:g}"}
    return f"{PATH}?{urlencode(words)}"


def _asked(client: Client, query: str, now: float, step: float) -> list[_Series]:
    try:
        answer = client.ask(_path(query, now, step), seconds=ANSWER_S)
        return client.read(answer, PATH, _Answer).data.result
    except StatusError as error:
        raise KvtuneError(
            f"{client.base}{PATH} answers {error.status}",
            "give Prometheus' own address, e.g. http://HOST:9090; a key: KVTUNE_API_KEY=KEY or --header",
        ) from None


def document(hour: Hour) -> Document:
    """Return the answer: of each instance what bounded it for how long, then the figures of what was most."""
    most = Counter(each.most or "no data" for each in hour.instances)
    regimes = ", ".join(f"{regime} {count(number)}" for regime, number in most.most_common())
    plural = "" if len(hour.instances) == 1 else "s"
    headline = (
        f"job {one_line(hour.job)}, the last hour, {count(len(hour.instances))} instance{plural}; "
        f"for most of it: {regimes}"
    )
    return Document(
        name="kvtune watch",
        subject=hour.job,
        headline=headline,
        sections=tuple(_sections(hour)),
        identity=identity("watch", hour.prometheus, hour.at),
        title=f"{one_line(hour.job)} · watch · kvtune",
    )


def live(hour: Hour) -> tuple[str, ...]:
    """Return the command that watches the instances now, if their names are addresses, and few enough for a line."""
    names = [each.instance for each in hour.instances]
    if len(names) > MOST_NAMED or not all(map(ADDRESS.fullmatch, names)):
        return ()
    return (command("watch", *(f"http://{name}" for name in names)),)


def _sections(hour: Hour) -> Iterator[Section]:
    regimes = sorted({regime for each in hour.instances for regime in each.seconds})
    columns = [
        Column("instance", right=False, folds=True),
        Column("model", right=False, rank=2),
        *(Column(regime) for regime in regimes),
        Column("hit", rank=1),
        Column("preempted", rank=1),
    ]
    rows = [
        (
            each.instance,
            each.model,
            *(f"{each.seconds[name] / 60:.1f} min" if name in each.seconds else "–" for name in regimes),
            percent(each.rate),
            count(each.preemptions),
        )
        for each in hour.instances
    ]
    yield Section(
        "hour",
        "What bounded each instance",
        tables=(grid(columns, rows),),
        notes=tuple(hour.notes),
        commands=live(hour),
    )
    for number, each in enumerate(hour.instances):
        if each.longest is not None:
            yield regime_section(each.longest, f"regime-{number}", f"{each.instance}: ")
