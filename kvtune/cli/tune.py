"""`kvtune tune`: search the settings for a model and its traffic, prove the gain on the engine, write a recipe."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from kvtune.cli import options
from kvtune.cli.query import Flags, Lab, Query, When, option
from kvtune.data.run.output import REPORTS

CONFIRMED = When("for settings that an engine confirms", on=("both", "host"), join=False, by="replayed")
RUN = When("for runs of an engine", on=("both", "host"), join=False)
GUARDED = When(
    "for simulated trials, and belongs to the worker that began the study", join=False, by="replayed"
)
COLLECTED = When(
    "for settings of kvtune's core that only an engine has", on=("both", "host"), join=False, core="kvtune"
)


@dataclass(frozen=True, kw_only=True)
class TuneQuery(Query):
    FACTS = {
        "by": {
            "replayed": "an --objective that a simulation has",
            "measured": "--objective ceiling, a figure that no simulation has",
        },
        "store": {"file": "a study in a file", "url": "--study URL"},
    }
    model: options.Model
    workload: options.Workload = ""
    trace: options.Trace = None
    core: options.CoreName = option("kvtune")("""kvtune: search the core's settings and vLLM's; stock: vLLM's
        own flags alone, for a server without kvtune.""")
    objective: options.Objective = "hit-rate"
    trials: int = option(40, When("for trials that are simulated", by="replayed"), min=1)("Simulated trials.")
    finalists: int = option(2, CONFIRMED, min=1)("How many of the best settings to confirm on the engine.")
    rounds: int = option(4, RUN, min=2)("Engine runs of stock and of each finalist, at most.")
    budget: float = option(600.0, RUN)("Seconds for the engine runs; two rounds run in any case.")
    on: Literal["both", "sim", "host"] = option("both")("""both: search in simulation, confirm on the engine;
        sim alone; or host: confirm on a simulated device, in a GPU engine's shape.""")
    slo: options.Slo = ""
    study: str = option("")("Journal of the study, resumed if it exists, or a database URL to share one.")
    join: bool = option(False, When("for a study that workers share", store="url", by="replayed"))("""Add
        trials to the shared study at --study URL.""")
    guard: list[str] | None = option(None, GUARDED)("""Another workload: settings whose hit rate there is
        over a point below stock's are dropped; repeatable.""")
    gc: bool = option(False, COLLECTED)("Also try the garbage collector's settings on the engine.")
    recipe: Path | None = option(None, When("written by the worker that began the study", join=False))("""
        Where to write the recipe. Default: beside the journal.""")
    platform: Annotated[options.LikeDevice, When("the device that is simulated", on="sim")] = None
    force: options.Force = False
    dummy: options.Dummy = False
    seed: options.Seed = 0
    output: options.Output = REPORTS
    open_: options.Open = False
    json: options.Json = False
    flags: Flags = ()

    @property
    def shared(self) -> str:
        """The URL of the database with the study; "" for a journal."""
        return self.study if "://" in self.study else ""


def tune(query: TuneQuery, lab: Lab) -> int:
    """Tune MODEL for WORKLOAD: simulate, confirm on the engine, write a recipe. vLLM's flags go after `--`."""
    from kvtune.answers.tune import tune as tuning
    from kvtune.answers.tune.objective import objective as objective_of
    from kvtune.answers.tune.objective import refuse_times, refuse_unless_replayed
    from kvtune.answers.tune.result import study_identity
    from kvtune.answers.tune.search import SearchSettings
    from kvtune.answers.tune.sweep import refuse_foreign_outputs
    from kvtune.answers.tune.trials import setup as setups
    from kvtune.answers.tune.trials.journal import StudyJournal
    from kvtune.cli.settings import set_up
    from kvtune.cli.views.plan import announce_study
    from kvtune.cli.views.trials import TrialsView, finish, interrupted
    from kvtune.data.run.slo import read_slo
    from kvtune.lab.setup.resolve import tokenizer_of
    from kvtune.requests.loads.spec import build

    limits = read_slo(query.slo)
    objective = objective_of(query.objective, slo=limits)
    query.refuse(by="replayed" if objective.replayed else "measured", store="url" if query.shared else "file")
    if query.on == "sim":
        refuse_unless_replayed(objective, "--on sim", "leave it out, or name another objective")
        refuse_times(objective, "--on sim")
    if query.shared:
        refuse_unless_replayed(objective, "--study URL", "leave it out, or name another objective")

    setup, work, facts = set_up(query, limits)
    url = query.shared
    if url and not query.join:
        path = setups.stored_study_path(url, query.output, setup)
    else:
        path = setups.study_path("" if url else query.study, query.output, "tune", setup)
    for each in query.guard or ():
        build(
            each, seed=query.seed, tokenizer=tokenizer_of(query.model, setup.engine_args)
        )  # a bad spec is refused before anything starts
    settings = tuning.TuneSettings(
        lab=lab,
        setup=setup,
        facts=facts,
        by=objective,
        output=query.output,
        recipe=query.recipe or path.with_suffix(".toml"),
        force=query.force,
        search=SearchSettings(trials=query.trials, seed=query.seed, storage=url, join=query.join),
        finalists=query.finalists,
        rounds=query.rounds,
        budget_s=query.budget,
        on_engine=query.on != "sim",
        guards=tuple(query.guard or ()),
        collector=query.gc,
    )
    engine_sides = 1 + query.finalists + query.gc * len(tuning.COLLECTOR)
    if not objective.replayed:
        engine_sides = 1 + len(tuning.tried_without_replays(settings))
    most = (query.on != "sim" and not query.join) * (query.rounds * engine_sides + 1)
    replays = (query.trials + 1) * objective.replayed
    may_be_none = query.core == "stock" or query.guard  # without a finalist, stock's run is the only one
    fewest = 1 if may_be_none else tuning.fewest_runs(objective, engine_sides - 1, in_turn=not query.gc)
    announce_study(setup, work, query.output, replays=replays, runs=most, fewest=fewest)
    refuse_foreign_outputs(path, settings.recipe, study_identity("tune", setup), force=query.force)
    with StudyJournal(path, "tune", setup) as journal:
        try:
            with TrialsView(replays, objective) as view:
                result = tuning.tune(settings, journal, view)
        except KeyboardInterrupt:
            return interrupted(journal)
    finish(result, path, objective, as_json=query.json, opened=query.open_, force=query.force)
    if not query.json:
        print(f"recipe    {result.recipe or 'none: nothing was shown to be better than stock'}")
    return 0
