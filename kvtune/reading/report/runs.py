"""The list that `kvtune runs` prints: a few figures for each run, as data and as a Document."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import msgspec
import numpy as np

from kvtune.data.run.signature import identity
from kvtune.data.run.types import RunLabel, Table, hits_of, untimed
from kvtune.data.show.parts import Document, Section, grid_of
from kvtune.data.show.terminal import Column
from kvtune.reading.analysis.figures import FIGURES, OBJECTIVES
from kvtune.reading.analysis.latency import of_server_ms, waits_ms

HITS, FIRST_TOKEN = FIGURES[OBJECTIVES["hit-rate"]], FIGURES[OBJECTIVES["ttft"]]

COLUMNS = ("prompt_tokens", "hit_tokens", "sent_s", "first_token_s")
"""Columns of `requests` that the figures need."""
OF_LOOKS = ("query_tokens", "hit_tokens", "first_tokens", "first_token_s")
"""Columns of `looks` that have them where a server's recording has no log, or the log no first tokens."""


class ListedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A row of `kvtune runs`. For an unreadable file, only `file`, `state` and `why` are set."""

    file: str
    page: str = ""
    model: str = ""
    workload: str = ""
    spec: str = ""
    core: str = ""
    source: str = ""
    started_at: str = ""
    requests: int = 0
    hit_rate: float | None = None
    ttft_ms_mean: float | None = None
    state: str = "unreadable"
    why: str = ""


class Runs(msgspec.Struct, frozen=True):
    """`kvtune runs --json`."""

    runs: list[ListedRun]
    schema: int = 1


def listed(header: RunLabel, requests: Table, file: str, page: str, looks: Table | None = None) -> ListedRun:
    """Return a run's row. `requests`, `looks`: columns COLUMNS and OF_LOOKS; empty if they were not read."""
    first = waits_ms(requests)
    first_ms = first[np.isfinite(first)] if not untimed(header) else first[:0]
    hits, mean = hits_of(requests).rate, float(first_ms.mean()) if len(first_ms) else None
    if looks is not None:
        hits = _hit_rate(looks) if hits is None else hits
        mean = of_server_ms(looks)[0] if mean is None else mean
    return ListedRun(
        file=file,
        page=page,
        model=header.model,
        workload=header.workload.name,
        spec=header.workload.spec,
        core=header.core.name,
        source=header.source,
        started_at=header.started_at,
        requests=header.workload.requests,
        hit_rate=hits,
        ttft_ms_mean=mean,
        state=header.state,
        why=header.why,
    )


def _hit_rate(looks: Table) -> float | None:
    query, hit = (float(looks[name].sum()) for name in OF_LOOKS[:2])
    return hit / query if np.isfinite(query + hit) and query else None


MOST_PLACES = 60


def document(runs: Runs, names: Sequence[str], state: str, places: str) -> Document:
    """`names`: for each file a short name such as `last~1`, or none. `state`: that of all runs listed, or empty."""
    rows = [
        {
            **({Column("run", right=False): names[number]} if names else {}),
            Column("model", right=False, folds=True): Path(run.model).name,
            Column("load", right=False, folds=True): run.workload,
            Column("core", right=False): f"{run.core}{f' ({run.source})' if run.source != 'engine' else ''}",
            Column("when", right=False, rank=1): _when(run.started_at),
            HITS.short: HITS.text(run.hit_rate),
            FIRST_TOKEN.short: FIRST_TOKEN.text(run.ttft_ms_mean),
            Column("state", right=False, folds=True, least=10): _state(run),
            Column("file", right=False, rank=3 if names else 0): run.file,
            Column("keys of the load", right=False, rank=4): run.spec.partition(":")[2],
        }
        for number, run in enumerate(runs.runs)
    ]
    # A long name would be folded, and its rest begin a line as kvtune's own do.
    where = places if len(places) <= MOST_PLACES else f"…{places[-MOST_PLACES:]}"
    headline = f"{len(rows) or 'no'} {state} run{'s' * (len(rows) != 1)} in {where}".replace("  ", " ")
    section = Section("runs", "Newest first", tables=(grid_of(rows),))
    return Document("kvtune runs", places, headline, (section,), identity("runs", places))


def _state(run: ListedRun) -> str:
    """Return the state or, for an unreadable file, `unreadable: WHY` without the file's name."""
    return f"unreadable: {run.why.rpartition(': ')[2]}" if run.state == "unreadable" else run.state


def _when(started_at: str) -> str:
    """Return local time: `11-21 10:53`, or `2025-11-21` if it is in another year."""
    try:
        begun = datetime.fromisoformat(started_at).astimezone()
    except ValueError:
        return "–"
    return f"{begun:%m-%d %H:%M}" if begun.year == datetime.now().year else f"{begun:%Y-%m-%d}"
