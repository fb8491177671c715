"""`kvtune profile`: run a workload on the real engine, measure it, write a run file and a page."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvtune.cli import completion, options
from kvtune.errors import UsageError
from kvtune.run.config import REPORTS

if TYPE_CHECKING:
    from kvtune.cli.views.results import Shown
    from kvtune.engine.setup import Setup
    from kvtune.run.types import Run


def profile(
    ctx: typer.Context,
    model: options.Model,
    workload: options.Workload = "",
    core: options.Core = "kvtune",
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="A core setting, core.NAME=VALUE; may be repeated.",
            autocompletion=completion.core_knobs,
        ),
    ] = None,
    recipe: options.Recipe = "",
    anyway: options.Anyway = False,
    probe: Annotated[
        str,
        typer.Option(
            help="How much is instrumented, from nothing to most: off, light, types, sites.",
            autocompletion=completion.probes,
        ),
    ] = "light",
    stacks: Annotated[
        bool, typer.Option("--stacks", help="Sample stacks with py-spy while measuring.")
    ] = False,
    repeat: Annotated[int, typer.Option(min=1, help="Number of runs, each on a fresh engine.")] = 1,
    ablate: Annotated[
        bool,
        typer.Option("--ablate", help="Measure what each core switch and each collector setting is worth."),
    ] = False,
    ablate_only: Annotated[
        str,
        typer.Option(
            "--ablate-only",
            help="Ablate only these, separated by commas.",
            autocompletion=completion.switches,
        ),
    ] = "",
    ablate_budget: Annotated[
        float,
        typer.Option(
            "--ablate-budget", min=0, help="Minutes to stop after; the same command resumes. 0: no limit."
        ),
    ] = 0.0,
    on: Annotated[
        str,
        typer.Option(
            "--on",
            help="engine; host: the engine's processes on a simulated device, no model; or sim: "
            "vLLM's own scheduler and KV cache without model and processes.",
            autocompletion=completion.engine_host_or_sim,
        ),
    ] = "engine",
    mode: Annotated[
        str,
        typer.Option(
            help="With --on sim: exact, or jump (steady decoding in leaps: same hits and times, other block ids).",
            autocompletion=completion.modes,
        ),
    ] = "exact",
    like: Annotated[
        Path | None,
        typer.Option(
            help="With --on sim or host: take KV specs, pool and step times from this run file's engine.",
            parser=options.run_path,
            metavar="RUN",
            autocompletion=completion.runs,
        ),
    ] = None,
    like_device: options.LikeDevice = "",
    step_us: Annotated[
        float | None,
        typer.Option(
            "--step-us",
            min=0,
            help="With --on host: microseconds that the device takes for a step. Default 0.",
        ),
    ] = None,
    tries: options.Tries = 4,
    trust: options.Trust = False,
    dummy: options.Dummy = False,
    slo: options.Slo = "",
    seed: options.Seed = 0,
    output: options.Output = REPORTS,
    open_: options.Open = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Print all tables of the page, not just one screen.")
    ] = False,
    json: options.Json = False,
) -> int:
    """Profile MODEL on the real vLLM engine, or in simulation. vLLM's own flags go after `--`."""
    from msgspec.structs import replace

    from kvtune.cli.app import engine_args
    from kvtune.cli.settings import PROBES, say_other_pool, with_recipe
    from kvtune.cli.views.results import Shown
    from kvtune.engine.profile import EngineBench, Profiled
    from kvtune.engine.resolve import resolve, tokenizer_of
    from kvtune.engine.setup import MODES, Load, Setup, Simulated
    from kvtune.run.slo import read_slo
    from kvtune.workload.spec import DEFAULT_SPEC, build

    shown = Shown(tries, as_json=json, opened=open_, verbose=verbose)
    options.choice("--on", on, ("engine", "host", "sim"))
    options.choice("--probe", probe, PROBES)
    source = ctx.get_parameter_source("core")
    typed = core if source is not None and source.name == "COMMANDLINE" else ""
    chosen, settings, flags, from_recipe = with_recipe(
        recipe, set_ or [], engine_args(ctx), model=model, core=typed, anyway=anyway
    )
    load = build(workload or DEFAULT_SPEC, seed=seed, tokenizer=tokenizer_of(model, flags))
    setup = Setup(
        model=model,
        load=Load.of(load, read_slo(slo)),
        core=chosen,
        core_settings=settings,
        dummy=dummy,
        engine_args=flags,
        from_recipe=sorted(from_recipe),
        platform=options.like_device(like_device, on=on),
    )
    bench = EngineBench(output=output, probe=probe, stacks=stacks)
    if like_device and like is not None:
        raise UsageError("--like and --like-device both say what is simulated", "leave one of them out")
    if settings.get("packed"):
        warn_of_packing(model, flags)
    if step_us is not None and on != "host":
        raise UsageError("--step-us sets the step time of a simulated device", "add --on host")
    if mode != "exact" and on != "sim":
        raise UsageError("--mode is for simulations", "add --on sim")
    if like is not None and on == "engine":
        raise UsageError("--like is for simulations and simulated devices", "add --on sim or --on host")
    if trust and like is None:
        raise UsageError("--trust is for the file of --like", "leave it out")
    if on == "sim":
        if stacks or ablate or ablate_only or repeat > 1:
            raise UsageError(
                "--stacks, --ablate and --repeat need the real engine", "leave them out, or use --on engine"
            )
        setup = replace(setup, device=Simulated(mode=options.choice("--mode", mode, MODES)))
        return replay(setup, like, output, shown, trusted=trust)
    if on == "host":
        setup = _on_host(setup, like, step_us, trusted=trust)
    if ablate or ablate_only:
        from kvtune.cli.ablate import run_ablation

        return run_ablation(setup, bench, ablate_only, repeat, ablate_budget, as_json=json, opened=open_)
    from kvtune.cli.views.plan import announce, engine_plan, say_loss
    from kvtune.cli.views.progress import ProgressView
    from kvtune.cli.views.results import show
    from kvtune.engine.experiment import BASELINE, Side, experiment
    from kvtune.sim.simulators import Simulators

    resolve(
        model, dummy=dummy or on == "host", engine_args=flags
    )  # a wrong MODEL is refused before a plan is made
    say_loss(load)
    announce(engine_plan(model, load, repeat, output, source=on))
    done: list[Profiled] = []

    def measure(side: Side[Profiled]) -> Profiled:
        label = model if repeat == 1 else f"{model} {len(done) + 1}/{repeat}"
        with ProgressView(len(load.requests), label) as view:
            view.phase("starting")
            result = bench.run(setup, view)
            view.phase("analysing")
        done.append(result)
        if result.error is not None:
            raise result.error
        return result

    ended = experiment([Side(BASELINE, {})], repeat, measure)
    if ended.error is not None and not done:
        raise ended.error
    # No replays after Ctrl-C or an engine's death, so that nobody waits for them: `explain RUN` makes them.
    replays = tries and ended.error is None
    with Simulators(model=model) if replays else nullcontext() as simulators:
        show(done, load, shown, simulators)
    if recipe:
        say_other_pool(recipe, done[-1].run)
    if ended.error is not None:
        raise ended.error
    return 0


def _on_host(setup: Setup, like: Path | None, step_us: float | None, *, trusted: bool) -> Setup:
    """Return the set-up on a timed device."""
    from msgspec.structs import replace

    from kvtune.fake_device.settings import constant

    setup = replace(setup, device=constant(step_us or 0.0))
    if like is None:
        return setup
    if step_us is not None:
        raise UsageError("--like and --step-us both say how long a step takes", "leave one of them out")
    return setup.like(_recorded(like, trusted), trusted=trusted)


def _recorded(like: Path, trusted: bool) -> Run:
    from kvtune.run.file import read_run

    run = read_run(like)
    if trusted:
        options.trusting(like, "", run.header.engine.args)
    return run


def replay(setup: Setup, like: Path | None, output: Path, shown: Shown, *, trusted: bool) -> int:
    from kvtune.cli.views.plan import say_device, say_loss
    from kvtune.cli.views.progress import ProgressView
    from kvtune.cli.views.results import show
    from kvtune.report.charts import warm_up
    from kvtune.sim.profile import SimulatorBench
    from kvtune.sim.simulators import Simulators

    load = setup.load.built()
    recorded = _recorded(like, trusted) if like is not None else None
    say_loss(load)
    if recorded is None:
        say_device(setup.platform)
    else:
        setup = setup.like(recorded, trusted=trusted)
    setup = setup.sized()  # refused before a simulator starts
    with Simulators(model=setup.model, platform=setup.platform) as simulators:
        with ProgressView(len(load.requests), setup.model) as view:
            view.phase("replaying")
            warm_up()
            result = SimulatorBench(simulators, output).run(setup, view.replayed)
            view.phase("analysing")
        show([result], load, shown, simulators)
    if result.error is not None:
        raise result.error
    return 0


def warn_of_packing(model: str, flags: Sequence[str]) -> None:
    """Warn, before the engine starts, if its attention kernels do not support packed blocks."""
    from kvtune.engine.flags import flag_value
    from kvtune.tune.space.model import model_facts

    facts = model_facts(model, None, 0, attention=flag_value(flags, "attention-backend") or "")
    if facts.packing_refusal:
        print(f"core.packed will not be used: {facts.packing_refusal}", file=sys.stderr)
