"""`kvtune profile`: run a workload on the real engine or in simulation, measure it, write a run file and a page."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from kvtune.cli import options
from kvtune.cli.query import Flags, Lab, Query, When, option
from kvtune.data.run.output import REPORTS

if TYPE_CHECKING:
    from kvtune.cli.settings import FromRecipe
    from kvtune.cli.views.results import Shown
    from kvtune.data.run.types import Run
    from kvtune.lab.setup.setup import Setup

PROCESSES = ("engine", "host")
PROBED = When("for an engine's processes", on=PROCESSES)
LENGTHENED = When("for an engine's processes, whose times it lengthens", on=PROCESSES)
SIMULATED = When("the engine that is simulated", "platform step_us", on=("sim", "host"))
REPLICATED = When("how many simulated engines share a load", on="sim")
ROUTED = When("how simulated engines share a load", on="sim")
WEIGHED = When("for a real device, as nothing else has weights", on="engine")
STEPPED = When("the step time of a simulated device", on="host", like=False)


@dataclass(frozen=True, kw_only=True)
class ProfileQuery(Query):
    model: options.Model
    workload: options.Workload = ""
    core: options.RecipeCore = None
    set_: options.CoreSetting = None
    recipe: options.Recipe = ""
    anyway: Annotated[options.Anyway, When("for a recipe of something else", recipe=True)] = False
    probe: Literal["off", "light", "types", "sites"] = option("light", PROBED)("""How much is instrumented,
        from nothing to most: off, light, types, sites.""")
    stacks: bool = option(False, LENGTHENED)("Sample stacks with py-spy while measuring.")
    repeat: int = option(1, When("for times that differ from run to run", on=PROCESSES), min=1)("""Number of
        runs, each on a fresh engine.""")
    on: Literal["engine", "host", "sim"] = option("engine")("""engine; host: the engine's processes on a
        simulated device, no model; or sim: vLLM's own scheduler and KV cache without model and processes.""")
    like: Path | None = option(None, "RUN", SIMULATED, parser=options.run_path)("""With --on sim or host:
        take KV specs, pool and step times from this run file's engine.""")
    platform: Annotated[options.LikeDevice, When("the device that is simulated", on="sim", like=False)] = None
    replicas: int | None = option(None, REPLICATED, min=1, max=64)("""With --on sim: engines like this one
        that share the load. Default: one, or as many as the log of `-w requests:..` names.""")
    router: options.Router | None = option(None, ROUTED)("""With --replicas: which engine gets a request:
        round-robin, session (all turns to one), least-busy (vLLM's own balancer, the default) or prefix (the most of
        the prompt in its cache).""")
    step_us: float | None = option(None, "US", STEPPED, min=0)("""With --on host: microseconds that the
        device takes for a step. Default 0.""")
    tries: options.Tries = 4
    trust: Annotated[options.Trust, When("for the file of --like", like=True)] = False
    dummy: Annotated[options.Dummy, WEIGHED] = False
    slo: options.Slo = ""
    seed: options.Seed = 0
    output: options.Output = REPORTS
    open_: options.Open = False
    verbose: bool = option(False, When("for what is printed of one run", json=False))("""Print all tables of
        the page, not just one screen.""")
    json: options.Json = False
    flags: Flags = ()


def profile(query: ProfileQuery, lab: Lab) -> int:
    """Profile MODEL on the real vLLM engine, or in simulation. vLLM's own flags go after `--`."""
    from msgspec.structs import replace

    from kvtune.cli.settings import with_recipe
    from kvtune.lab.setup.setup import Simulated

    recipe = with_recipe(
        query.recipe, query.set_ or [], query.flags, model=query.model, core=query.core, anyway=query.anyway
    )
    if recipe.core_settings.get("packed"):
        warn_of_packing(query.model, recipe.flags)
    setup = _set_up(query, recipe)
    if query.on == "sim":
        from kvtune.lab.sim.routing import routing

        shared = routing(setup.load.built(), query.replicas or 0, query.router or "")
        device = Simulated(**shared._asdict())
        return replay(query, replace(setup, device=device, platform=query.platform), lab)
    setup = _on_host(query, setup) if query.on == "host" else replace(setup, dummy=query.dummy)
    return measure(query, setup, lab)


def _set_up(query: ProfileQuery, recipe: FromRecipe) -> Setup:
    """Return what every run of the query has."""
    from kvtune.data.run.slo import read_slo
    from kvtune.lab.setup.resolve import tokenizer_of
    from kvtune.lab.setup.setup import Load, Setup
    from kvtune.requests.loads.spec import DEFAULT_SPEC, build

    tokenizer = tokenizer_of(query.model, recipe.flags)
    load = build(query.workload or DEFAULT_SPEC, seed=query.seed, tokenizer=tokenizer)
    return Setup(
        model=query.model,
        load=Load.of(load, read_slo(query.slo)),
        core=recipe.core,
        core_settings=recipe.core_settings,
        engine_args=recipe.flags,
        from_recipe=sorted(recipe.alone),
    )


def _shown(query: ProfileQuery) -> Shown:
    from kvtune.cli.views.results import Shown

    return Shown(
        query.tries, as_json=query.json, opened=query.open_, verbose=not query.json and query.verbose
    )


def measure(query: ProfileQuery, setup: Setup, lab: Lab) -> int:
    """Run the set-up on the engine as often as asked, and show the runs."""
    from kvtune.cli.settings import say_other_pool
    from kvtune.cli.views.plan import announce, engine_plan, say_loss
    from kvtune.cli.views.progress import ProgressView
    from kvtune.cli.views.results import show
    from kvtune.lab.engine.experiment import BASELINE, Side, experiment
    from kvtune.lab.engine.profile import Profiled
    from kvtune.lab.setup.resolve import resolve

    model, times, load = setup.model, query.repeat, setup.load.built()
    bench = lab.engine(query.output, probe=query.probe, stacks=query.stacks)
    # A wrong MODEL is refused before a plan is made.
    resolve(model, dummy=setup.dummy or query.on == "host", engine_args=setup.engine_args)
    say_loss(load)
    announce(engine_plan(model, load, times, query.output, source=query.on))
    done: list[Profiled] = []

    def measured(side: Side[Profiled]) -> Profiled:
        label = model if times == 1 else f"{model} {len(done) + 1}/{times}"
        with ProgressView(len(load.requests), label) as view:
            view.phase("starting")
            result = bench.run(setup, view)
            view.phase("analysing")
        done.append(result)
        if result.error is not None:
            raise result.error
        return result

    ended = experiment([Side(BASELINE, {})], times, measured)
    if ended.error is not None and not done:
        raise ended.error
    # No replays after Ctrl-C or an engine's death, so that nobody waits for them: `explain RUN` makes them.
    replays = query.tries and ended.error is None
    with lab.simulators(model) if replays else nullcontext() as simulators:
        show(done, load, _shown(query), simulators)
    if query.recipe:
        say_other_pool(query.recipe, done[-1].run)
    if ended.error is not None:
        raise ended.error
    return 0


def _on_host(query: ProfileQuery, setup: Setup) -> Setup:
    """Return the set-up on a timed device."""
    from msgspec.structs import replace

    from kvtune.lab.device.settings import constant

    if query.like is None:
        return replace(setup, device=constant(query.step_us or 0.0))
    timed = replace(setup, device=constant(0.0))
    return timed.like(_recorded(query.like, query.trust), trusted=query.trust)


def _recorded(like: Path, trusted: bool) -> Run:
    from kvtune.data.run.file import read_run

    run = read_run(like)
    if trusted:
        options.trusting(like, "", run.header.engine.args)
    return run


def replay(query: ProfileQuery, setup: Setup, lab: Lab) -> int:
    """Run the set-up in simulation and show it."""
    from kvtune.cli.views.plan import say_device, say_loss
    from kvtune.cli.views.progress import ProgressView
    from kvtune.cli.views.results import show
    from kvtune.data.show.charts import warm_up
    from kvtune.lab.engine.profile import check_output
    from kvtune.lab.sim.profile import SimulatorBench

    load = setup.load.built()
    say_loss(load)
    if query.like is None:
        say_device(setup.platform)
    else:
        setup = setup.like(_recorded(query.like, query.trust), trusted=query.trust)
    setup = setup.sized()  # refused before a simulator starts
    check_output(query.output)
    with lab.simulators(setup.model, setup.platform) as simulators:
        with ProgressView(len(load.requests), setup.model) as view:
            view.phase("replaying")
            warm_up()
            result = SimulatorBench(simulators, query.output).run(setup, view.replayed)
            view.phase("analysing")
        show([result], load, _shown(query), simulators)
    if result.error is not None:
        raise result.error
    return 0


def warn_of_packing(model: str, flags: Sequence[str]) -> None:
    """Warn, before the engine starts, if its attention kernels do not support packed blocks."""
    from kvtune.answers.tune.space.model import model_facts

    facts = model_facts(model, None, 0, engine_args=flags)
    if facts.packing_refusal:
        print(f"core.packed will not be used: {facts.packing_refusal}", file=sys.stderr)
