"""Replays that `profile` adds to its run: the other core, and remedies if the cache limits the run.

In the CLI's process. The run is the user's own, so its flags and its model are replayed as they are.
"""

from __future__ import annotations

from contextlib import suppress

from kvtune.analysis.run import RunAnalysis
from kvtune.analysis.verdict import OF_THE_CACHE
from kvtune.engine.setup import Setup
from kvtune.errors import KvtuneError
from kvtune.explain.explanation import Bench, explained, with_misses, with_other_core
from kvtune.explain.replays import View
from kvtune.run.extras import Replayed
from kvtune.run.types import Run
from kvtune.sim.simulators import Simulators
from kvtune.workload.types import Workload


def advised(simulators: Simulators, analysis: RunAnalysis, workload: Workload, tries: int, view: View) -> Run:
    """Return the run with its replays, or the reason why they failed, in `header.extra.replayed`.

    If the cache limits the run, also add the exact causes of its misses. `tries` as for `explain`.
    """
    run = analysis.run
    if run.header.state != "complete" or not len(run.table("requests")["id"]):
        return run.with_extra(replayed=Replayed(why=f"the run is {run.header.state}"))
    try:
        setup = Setup.of_run(run, model=run.header.model, trusted=True)
        bench = Bench(simulators, run, workload, view, setup, run.header.model)
        if not set(analysis.verdict.limits) & set(OF_THE_CACHE):
            return run.with_extra(replayed=with_other_core(bench))
        explanation = explained(bench, tries)
    except KvtuneError as error:
        return run.with_extra(replayed=Replayed(why=error.message))
    run = run.with_extra(replayed=explanation.replayed)
    with suppress(KvtuneError):  # the replay's hits differ from the run's: so may the causes
        run = with_misses(run, explanation)
    return run
