"""Replays a recorded run for `kvtune explain`: each engine with the requests that it served.

In the CLI's process. Engines that share a load (`--data-parallel-size`) share no cache, so one replay of all requests
would have hits that no engine can have.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvtune.engine.setup import Setup
from kvtune.errors import KvtuneError
from kvtune.run.engines import ranks, served_by
from kvtune.run.types import Run
from kvtune.sim.simulators import Simulators
from kvtune.sim.worker import Report
from kvtune.workload.types import Workload


class View:
    """Receives the progress of an explanation. Does nothing; subclasses show it."""

    def phase(self, text: str) -> None: ...

    def progress(self, report: Report) -> None: ...


def sent_requests(run: Run) -> NDArray[np.bool_]:
    """Return a mask of the workload's requests that were sent: a run that ended early sent only some."""
    return np.isfinite(run.table("requests")["sent_s"])


def replays(
    simulators: Simulators, run: Run, workload: Workload, wanted: Sequence[Setup], view: View
) -> list[Run | KvtuneError]:
    """Replay the run with each of the set-ups. If it had several engines, replay each with its own requests."""
    numbers, sent = ranks(run), sent_requests(run)
    if len(numbers) == 1:
        outcomes = dict(simulators.map(workload, wanted, view.progress))
        return [outcomes[n] for n in range(len(wanted))]
    rows = [np.flatnonzero(served_by(run, rank) & sent) for rank in numbers]
    rows = [each for each in rows if len(each)]
    at_once = [most_at_once(run, each) for each in rows]
    single = [
        setup.replayed(requests=each.tolist(), at_once=most)
        for setup in wanted
        for each, most in zip(rows, at_once, strict=True)
    ]
    outcomes = dict(simulators.map(workload, single, view.progress))
    return [joined([outcomes[n * len(rows) + i] for i in range(len(rows))], rows) for n in range(len(wanted))]


def most_at_once(run: Run, rows: NDArray[np.int64]) -> int:
    """Return the most of these requests in flight at once; the workload's own limit is for all engines together."""
    sent, finished = (run.table("requests")[name][rows] for name in ("sent_s", "finished_s"))
    finished = finished[np.isfinite(finished)]
    # At equal times, an answer comes before the sending of the next request.
    order = np.lexsort((np.r_[np.ones(len(sent)), np.zeros(len(finished))], np.r_[sent, finished]))
    return int(np.cumsum(np.r_[np.ones(len(sent), int), np.full(len(finished), -1)][order]).max(initial=0))


def joined(replayed: Sequence[Run | KvtuneError], rows: Sequence[NDArray[np.int64]]) -> Run | KvtuneError:
    """Join the replays of several engines into one run. A request's hits and verdict come from its engine's replay."""
    runs: list[Run] = []
    for each in replayed:
        if isinstance(each, KvtuneError):
            return each
        runs.append(each)
    first = runs[0]
    requests = {name: column.copy() for name, column in first.table("requests").items()}
    verdicts = list(first.header.extra.verdicts)
    for each, served in zip(runs[1:], rows[1:], strict=True):
        for name, column in each.table("requests").items():
            requests[name][served] = column[served]
        if verdicts:
            for row in served.tolist():
                verdicts[row] = each.header.extra.verdicts[row]
    return Run(first.header, {**first.tables, "requests": requests}).with_extra(verdicts=verdicts)
