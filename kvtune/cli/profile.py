"""`kvtune profile`: run the real engine on a workload, measure it, leave a run file and a page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvtune.errors import UsageError

if TYPE_CHECKING:
    from kvtune.engine.profile import ProfileJob


def profile(
    ctx: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            help="What `vllm serve` takes, or tiny-opt, tiny-llama, tiny-gemma3, tiny-qwen3next, tiny-granite."
        ),
    ],
    workload: Annotated[
        str,
        typer.Option(
            "-w",
            "--workload",
            help="name or name:key=value,..; names: decode, prefill, rounds, zipf, chat, mix, trace.",
        ),
    ] = "",
    core: Annotated[str, typer.Option(help="KV core: kvtune or stock.")] = "kvtune",
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="A core setting, core.NAME=VALUE; may be repeated.")
    ] = None,
    recipe: Annotated[str, typer.Option(help="A recipe (file or name): its engine and core settings.")] = "",
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Use a recipe of another model, version or device.")
    ] = False,
    probe: Annotated[str, typer.Option(help="Instruments: off, light, types, sites, full.")] = "light",
    stacks: Annotated[
        bool, typer.Option("--stacks", help="Sample stacks with py-spy while measuring.")
    ] = False,
    repeat: Annotated[int, typer.Option(min=1, help="Run this often, each on a fresh engine.")] = 1,
    ablate: Annotated[
        bool, typer.Option("--ablate", help="Turn each core switch and collector setting over in turn.")
    ] = False,
    ablate_only: Annotated[
        str, typer.Option("--ablate-only", help="Only these of --ablate, separated by commas.")
    ] = "",
    ablate_budget: Annotated[
        float, typer.Option("--ablate-budget", min=0, help="Minutes; the same command goes on. 0: no end.")
    ] = 0.0,
    on: Annotated[
        str, typer.Option("--on", help="engine, or sim: vLLM's own scheduler and cache without a model.")
    ] = "engine",
    mode: Annotated[
        str,
        typer.Option(help="With --on sim: exact, jump (steady decoding skipped) or coarse (for screening)."),
    ] = "exact",
    like: Annotated[
        Path | None,
        typer.Option(
            help="With --on sim: a run file whose engine (KV specs, pool, step times) is simulated."
        ),
    ] = None,
    dummy: Annotated[
        bool, typer.Option("--dummy", help="Random weights on the model's real config.")
    ] = False,
    slo: Annotated[
        str, typer.Option("--slo", help="Limits in ms, ttft=500,tpot=50,e2e=8000: what counts as goodput.")
    ] = "",
    seed: Annotated[int, typer.Option(help="Seed of the workload.")] = 0,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Folder for the run file and the page.")
    ] = Path("reports"),
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on stdout, and nothing else.")
    ] = False,
) -> int:
    """Profile MODEL on the real vLLM engine, or replay without it. vLLM's own flags stand after `--`."""
    from kvtune.cli.app import engine_args
    from kvtune.cli.settings import core_choice, probe_choice, with_recipe
    from kvtune.engine.profile import Profiled, ProfileJob
    from kvtune.engine.profile import profile as run_profile
    from kvtune.run.slo import read_slo
    from kvtune.workload.spec import DEFAULT_SPEC, build

    settings, flags = with_recipe(recipe, set_ or [], engine_args(ctx), model=model, anyway=anyway)
    job = ProfileJob(
        model=model,
        workload=build(workload or DEFAULT_SPEC, seed=seed),
        core=core_choice(core),
        core_settings=settings,
        probe=probe_choice(probe),
        stacks=stacks,
        dummy=dummy,
        engine_args=flags,
        output=output,
        slo=read_slo(slo),
    )
    if on != "engine" or like is not None or mode != "exact":
        if stacks or ablate or ablate_only or repeat > 1:
            raise UsageError(
                "--on sim has no host to measure: no --stacks, --ablate or --repeat", "use --on engine"
            )
        return _replay(job, on, mode, like, as_json=json)
    if ablate or ablate_only:
        from kvtune.cli.ablate import run_ablation

        return run_ablation(job, ablate_only, repeat, ablate_budget, as_json=json)
    from kvtune.cli.views.progress import ProgressView
    from kvtune.cli.views.results import show

    done: list[Profiled] = []
    for number in range(repeat):
        label = model if repeat == 1 else f"{model} {number + 1}/{repeat}"
        with ProgressView(len(job.workload.requests), label) as view:
            result = run_profile(job, view)
            view.phase("analysing")
        done.append(result)
        if result.error is not None:
            break
    show(done, job.workload, as_json=json)
    error = done[-1].error
    if error is not None:
        raise error
    return 0


def _replay(job: ProfileJob, on: str, mode: str, like: Path | None, *, as_json: bool) -> int:
    from kvtune.cli.views.progress import ProgressView
    from kvtune.cli.views.results import show
    from kvtune.run.file import read_run
    from kvtune.sim.profile import profile as replayed
    from kvtune.sim.settings import MODES

    if on != "sim":
        hint = "--on takes engine or sim" if on != "engine" else "add --on sim"
        raise UsageError(f"--on {on} does not replay" if on == "engine" else f"--on {on} is no place", hint)
    if mode not in MODES:
        raise UsageError(f"--mode {mode} is no mode", f"--mode takes {', '.join(MODES)}")
    recorded = read_run(like) if like is not None else None
    with ProgressView(len(job.workload.requests), job.model) as view:
        view.phase("replaying")
        result = replayed(job, mode, recorded, view.replayed)
        view.phase("analysing")
    show([result], job.workload, as_json=as_json)
    if result.error is not None:
        raise result.error
    return 0
