"""Replays a recorded run for `kvtune explain`: several engines (`--data-parallel-size`) with the run's own routing.

In the CLI's process. Engines share a load and no cache, so one engine with all requests would have hits that none of
them can have.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvtune.engine.setup import GIVEN, Setup
from kvtune.errors import KvtuneError
from kvtune.run.engines import ranks
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
    """Replay the run with each of the set-ups, on as many engines as it had."""
    outcomes = dict(simulators.map(workload, [as_routed(run, setup) for setup in wanted], view.progress))
    return [outcomes[n] for n in range(len(wanted))]


def as_routed(run: Run, setup: Setup) -> Setup:
    """Return the set-up with as many engines as the run had, each of which gets the requests that it served."""
    numbers = ranks(run)
    if len(numbers) == 1:
        return setup
    routed = run.table("requests")["engine"].tolist()
    return setup.replayed(replicas=max(numbers) + 1, router=GIVEN, routed=routed)
