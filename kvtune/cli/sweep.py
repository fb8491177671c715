"""`kvtune sweep`: try the named knobs' values in the simulator, on the engine, or both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from kvtune.cli import options
from kvtune.cli.query import Flags, Lab, Query, When, option
from kvtune.data.run.output import REPORTS

COLLECTED = When("for settings that only an engine has", on=("engine", "both", "host"))


@dataclass(frozen=True, kw_only=True)
class SweepQuery(Query):
    model: options.Model
    workload: options.Workload = ""
    trace: options.Trace = None
    pin: bool = option(False)("Try pin_window, slack and policy.")
    min_drop: bool = option(False)("""Try min_drop: keep the windows before the slack only if a step computes
        at least this many blocks.""")
    block_size: bool = option(False)("Try the block sizes (or layouts) that suit MODEL.")
    retention: bool = option(False)("Try vLLM's prefix_cache_retention_interval.")
    chunk: bool = option(False)("Try max_num_batched_tokens.")
    gc: bool = option(False, COLLECTED)("Try the garbage collector's settings; needs the engine.")
    states: bool = option(False, When("a table made by replays", on="sim"))("""Replay what flags and the core
        keep of recurrent states, and print one small table; no other knob.""")
    set_: list[str] | None = option(None)("Try these values: KNOB=V1,V2,..; may be repeated.")
    trials: int = option(0, min=0)("Draw this many from the grid; 0: all.")
    core: options.Core = "kvtune"
    on: Literal["sim", "engine", "both", "host"] = option("sim")("""Where trials run: sim, engine or both; or
        host: on a simulated device.""")
    objective: options.Objective = "hit-rate"
    slo: options.Slo = ""
    study: str = option("")("Journal of the study; one that exists is resumed. Default: a new one in -o.")
    platform: Annotated[options.LikeDevice, When("the device that is simulated", on="sim")] = None
    force: options.Force = False
    dummy: options.Dummy = False
    seed: options.Seed = 0
    output: options.Output = REPORTS
    open_: options.Open = False
    json: options.Json = False
    md: Annotated[options.Md, When("of the table of --states, without --json", states=True, json=False)] = (
        False
    )
    page: Annotated[options.Page, When("of the table of --states", states=True)] = None
    flags: Flags = ()


def sweep(query: SweepQuery, lab: Lab) -> int:
    """Try the values of the named knobs on MODEL and WORKLOAD. vLLM's own flags go after `--`."""
    if query.states:
        return _states(query, lab)
    from msgspec import structs

    from kvtune.answers.tune import sweep as sweeps
    from kvtune.answers.tune.objective import objective as objective_of
    from kvtune.answers.tune.objective import refuse_times, refuse_unless_replayed
    from kvtune.answers.tune.result import study_identity
    from kvtune.answers.tune.space.grid import build_space, choose, engine_only, needs_tier
    from kvtune.answers.tune.trials import setup as setups
    from kvtune.answers.tune.trials.journal import StudyJournal
    from kvtune.cli.settings import set_up
    from kvtune.cli.views.plan import announce_study
    from kvtune.cli.views.trials import TrialsView, finish, interrupted
    from kvtune.data.flags import settings_given
    from kvtune.data.knobs import GROUPS
    from kvtune.data.run.slo import read_slo

    limits = read_slo(query.slo)
    objective = objective_of(query.objective, slo=limits)
    given = {"pin": query.pin, "min_drop": query.min_drop, "block_size": query.block_size, "gc": query.gc}
    given |= {"retention": query.retention, "chunk": query.chunk}
    chosen_groups = [group for group in GROUPS if given[group]]
    setup, work, facts = set_up(query, limits)
    grid = build_space(chosen_groups, query.set_ or [], facts)
    simulated, run = query.on in ("sim", "both"), query.on != "sim"
    if not run:
        refuse_unless_replayed(objective, "--on sim", "sweep with --on host, or with --on engine")
        refuse_times(objective, "--on sim")
        engine_only(grid)
    needs_tier(grid, {name.replace("-", "_") for name in settings_given(setup.engine_args)})
    planned = sweeps.planned_trials(setup, choose(grid, query.trials, query.seed))
    path = setups.study_path(query.study, query.output, "sweep", setup)
    sweeps.refuse_foreign_outputs(path, None, study_identity("sweep", setup), force=query.force)
    with StudyJournal(path, "sweep", setup) as journal:
        held = {trial.key for trial in journal.trials}
        replays, runs = (sum(w.key(place, setup) not in held for w in planned) for place in ("sim", "engine"))
        replays, runs = replays * simulated, runs * run
        announce_study(setup, work, query.output, replays=replays, runs=runs)
        try:
            if simulated:
                with TrialsView(replays, objective) as view:
                    sweeps.run(setup.replayed(), planned, journal, view, lab)
            if run:
                with TrialsView(runs, objective, "engine") as view:
                    sweeps.run(setup, planned, journal, view, lab, output=query.output)
        except KeyboardInterrupt:
            return interrupted(journal)
        result = sweeps.result(journal.trials, objective)
        if simulated and (why := sweeps.pool_that_hits(setup, journal.trials, lab)):
            result = structs.replace(result, notes=(why,))
    finish(result, path, objective, as_json=query.json, opened=query.open_, force=query.force)
    sweeps.fail_if_none(journal.trials)
    return 0


def _states(query: SweepQuery, lab: Lab) -> int:
    """Replay what flags keep of MODEL's recurrent states; print the table."""
    from kvtune.answers.states.document import document
    from kvtune.answers.states.table import states_of
    from kvtune.base.errors import UsageError
    from kvtune.cli.settings import set_up
    from kvtune.cli.views.answer import print_answer
    from kvtune.cli.views.plan import announce

    setup, work, _ = set_up(query, {})
    announce(f"7 to 12 replays of {len(work.requests):,} requests without a model, no engine start")
    with lab.simulators(setup.model, setup.platform) as simulators:
        states = states_of(setup.sized(), work, simulators.outcomes)
    if states is None:
        raise UsageError(
            f"{query.model} keeps no recurrent states, or its prefix caching is off",
            "`kvtune doctor MODEL` says which",
        )
    print_answer(states, document(states), json=query.json, md=query.md, page=query.page)
    return 0
