"""One trial on the real engine: a profiled run with the trial's settings. Runs in the CLI's process."""

from __future__ import annotations

import time
from pathlib import Path

from kvtune.analysis.study import Role, Settings, Trial
from kvtune.engine.setup import Setup
from kvtune.errors import EXIT_INTERRUPTED, EXIT_USAGE, KvtuneError
from kvtune.lab import LAB, Lab
from kvtune.run.types import Run
from kvtune.tune.trials.setup import packing_failure


def engine_trial(
    setup: Setup,
    settings: Settings,
    number: int,
    *,
    stock: bool,
    role: Role,
    output: Path,
    lab: Lab = LAB,
) -> tuple[Trial, Run | None]:
    """Run a trial; return it and its run. `Trial.why` says why an engine failed. KeyboardInterrupt on Ctrl-C."""
    from kvtune.analysis.run import RunAnalysis
    from kvtune.analysis.summary import summary

    asked = (setup.stock() if stock else setup).with_knobs(settings)
    core = asked.core
    started = time.monotonic()
    engine = lab.engine(output, environment={"KVTUNE_STRICT": "1"} if core == "kvtune" else {})
    failed, run, path = "", None, ""
    try:
        done = engine.run(asked)
        run, path = done.run, str(done.path)
        if done.error is not None:
            if done.error.exit_code == EXIT_INTERRUPTED:
                raise KeyboardInterrupt
            failed = done.error.message
    except KvtuneError as error:
        if error.exit_code == EXIT_INTERRUPTED:
            raise KeyboardInterrupt from error
        if error.exit_code == EXIT_USAGE and role == "baseline":
            raise  # no other trial would run either
        failed = f"{error.message} ({error.hint})" if error.hint else error.message
    figures = summary(RunAnalysis(run, setup.load.built())) if run is not None else {}
    failed = failed or packing_failure(figures)
    trial = Trial(
        number=number,
        settings=settings,
        on="engine",
        core=core,
        role=role,
        state="failed" if failed else "complete",
        why=failed,
        elapsed_s=time.monotonic() - started,
        run_file=path,
        seed=setup.load.seed,
        summary=figures,
    )
    return trial, run
