"""`kvtune diff`: what another version of vLLM changes, before it is deployed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvtune.cli import options
from kvtune.cli.query import Flags, Lab, Query, When
from kvtune.errors import EXIT_FAILED, KvtuneError, UsageError

if TYPE_CHECKING:
    from kvtune.diff.answers import Answers
    from kvtune.diff.result import Load
    from kvtune.engine.setup import Setup
    from kvtune.vllm.environments import Environment
    from kvtune.vllm.platforms import Platform

SIDE = "A version of vLLM, which is installed once; the folder of an environment; or a checkout of vLLM."


@dataclass(frozen=True, kw_only=True)
class DiffQuery(Query):
    old: Annotated[str, typer.Argument(help=SIDE, metavar="OLD")]
    new: Annotated[str, typer.Argument(help="Another.", metavar="NEW")]
    model: Annotated[
        str | None,
        typer.Argument(
            help="A built-in model, a folder with config.json, or a name on the hub. Default: the shapes of "
            "docs/models.md.",
        ),
        When("one model", models=False),
    ] = None
    models: Annotated[
        Path | None,
        typer.Option("--models", help="A file with a model a line.", metavar="FILE"),
        When("a list of models", model=False),
    ] = None
    workload: Annotated[
        options.Workload, When("a load of MODEL, which both versions' schedulers get", model=True)
    ] = ""
    seed: Annotated[options.Seed, When("of the load", workload=True)] = 0
    platform: options.LikeDevice = None
    fail_on: Annotated[
        str,
        typer.Option(
            "--fail-on",
            help="Exit 1 if this holds for a model: 'hits < -2 points', 'pool < -5 %', 'gone > 0'.",
        ),
    ] = ""
    page: options.Page = None
    json: options.Json = False
    md: Annotated[options.Md, When(options.NO_MD, json=False)] = False
    flags: Flags = ()


def diff(query: DiffQuery, lab: Lab) -> int:
    """Compare two versions of vLLM: blocks, hits, pools, defaults, names, and how they take a load. Needs no GPU.

    Exit code: 1 if --fail-on holds. vLLM's own flags go after `--`, to both.
    """
    from msgspec.structs import replace

    from kvtune.cli.views.answer import print_answer
    from kvtune.cli.views.plan import begin
    from kvtune.diff.asking import asked
    from kvtune.diff.differences import diff as compared
    from kvtune.diff.document import document
    from kvtune.diff.limits import broken, limit
    from kvtune.engine.platform import engines
    from kvtune.engine.setup import Setup
    from kvtune.vllm.environments import environment

    condition = limit(query.fail_on) if query.fail_on else None
    names = _models(query)
    platform = query.platform or _own_gpu()
    device = engines(platform).title
    environments = [environment(named, begin) for named in (query.old, query.new)]
    begin(f"asking both about {len(names)} model{'s' if len(names) != 1 else ''} as on {device}")
    setups = [Setup(model=name, engine_args=list(query.flags), platform=platform) for name in names]
    old, new = asked(environments, setups)
    load = _replayed(query, lab, environments, (old, new), setups[0]) if query.workload else None
    answer = compared((query.old, query.new), old, new, device, load)
    unknown = None
    try:
        answer = replace(answer, broken=broken(answer, condition) if condition is not None else [])
    except KvtuneError as error:  # the answer is printed all the same
        unknown = error
    print_answer(answer, document(answer), json=query.json, md=query.md, page=query.page)
    if unknown is not None:
        raise unknown
    return EXIT_FAILED if answer.broken else 0


def _own_gpu() -> Platform | None:
    """Return this machine's GPU as a device that both are asked as; None for a CPU."""
    from kvtune.engine.platform import here
    from kvtune.vllm.platforms import DEVICES, GIB
    from kvtune.vllm.platforms import device as of_memory

    own = here()
    if own.kind == "cpu" or not own.memory_bytes:
        return None
    listed = next((device for device in DEVICES.values() if device.name == own.name), None)
    return listed or of_memory(f"{own.memory_bytes / GIB:.3f}GiB")


def _models(query: DiffQuery) -> list[str]:
    from kvtune.engine.models import SHAPES
    from kvtune.files import explained, read_regular

    if query.models is None:
        return [query.model] if query.model is not None else list(SHAPES)
    with explained(query.models, "give a file with a model a line"):
        lines = read_regular(query.models, 1 << 20).decode(errors="replace").splitlines()
    names = list(dict.fromkeys(line.strip() for line in lines if line.strip()))
    if not names:
        raise UsageError(f"{query.models} names no model", "give a file with a model a line")
    return names


def _replayed(
    query: DiffQuery,
    lab: Lab,
    environments: list[Environment],
    answers: tuple[Answers, Answers],
    setup: Setup,
) -> Load:
    """Replay the load in both. What is wrong with it is said beside what is known without it."""
    from kvtune.cli.views.plan import begin
    from kvtune.diff.replays import replayed
    from kvtune.diff.result import Load
    from kvtune.engine.resolve import tokenizer_of
    from kvtune.workload.spec import build

    try:
        workload = build(query.workload, seed=query.seed, tokenizer=tokenizer_of(setup.model, query.flags))
        gpus = max(getattr(side.models[setup.model].figures, "gpus", 1) for side in answers)
        spread = setup.with_flags(tensor_parallel_size=gpus) if gpus > 1 else setup
        begin(f"replaying {len(workload.requests)} requests through both schedulers")
        sites = [side.version.site for side in answers]
        return replayed(lab, environments, sites, spread.stock().sized(), workload, query.workload)
    except KvtuneError as error:
        failed = [f"{error.message}; {error.hint}" if error.hint else error.message]
        return Load(workload=query.workload, model=setup.model, failed=failed)
