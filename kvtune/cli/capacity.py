"""`kvtune capacity`: how many sessions fit an engine, where it ends, and what moves that."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from kvtune.base.errors import UsageError
from kvtune.cli import options
from kvtune.cli.query import Flags, Lab, Query, When, either, option

if TYPE_CHECKING:
    from kvtune.lab.device.cost import StepCost
    from kvtune.lab.setup.setup import Setup
REPLAYED = When("the engine that is replayed", "platform cost")
TIMED = either("a limit of times, and step times are not known", "like cost")
SHARED = When("how several engines share a load", replicas_up_to=True)


@dataclass(frozen=True, kw_only=True)
class CapacityQuery(Query):
    model: options.Model
    workload: options.Workload = ""
    like: Path | None = option(None, "RUN", REPLAYED, parser=options.run_path)("""Take KV specs, pool and
        step times from this run file's engine.""")
    platform: Annotated[options.LikeDevice, When("the device that is simulated", like=False)] = None
    cost: str = option("", "TIMES", When("the step times of an engine without a run", like=False))("""Step
        times where no run has them, in ms: token=0.07,step=15,decode=0.06 (of a prompt token, of a step, of a
        running request).""")
    keep: str = option("90%", "SHARE")("The share of an infinite cache's hits that must remain.")
    slo: str = option("", *TIMED)("""Latency limits in ms that nine of ten requests must meet:
        ttft=2000,tpot=80. Needs step times.""")
    sessions: int = option(0, min=0)("Replay this number and what moves it; 0: search the number.")
    seeds: int = option(3, min=1, max=64)("Seeds to search; others are replayed at the answer.")
    remedies: bool = option(True, "--remedies/--no-remedies")("Replay what may move the answer.")
    replicas_up_to: int | None = option(None, "MOST", min=2, max=64)("""Say how many engines like this one
        the load needs, of 1 to this many: a log at its own times, or with --sessions N, N at once.""")
    router: options.Router = option("least-busy", SHARED)("""Which of the replicas gets a request, as
        in `kvtune profile --on sim`.""")
    recipe: str = option("")("""Replay this recipe's settings: a file, or a name that `kvtune recipe list`
        shows.""")
    anyway: Annotated[options.Anyway, When("for a recipe of something else", recipe=True)] = False
    page: options.Page = None
    trust: Annotated[options.Trust, When("for the file of --like", like=True)] = False
    json: options.Json = False
    md: options.Md = False
    flags: Flags = ()


def capacity(query: CapacityQuery, lab: Lab) -> int:
    """Count the sessions that fit MODEL's KV cache at once. vLLM's own flags go after `--`.

    Stock vLLM is replayed, or with --recipe what that sets.
    """
    from msgspec import structs

    from kvtune.answers.capacity.document import document
    from kvtune.answers.capacity.question import Question, answer
    from kvtune.answers.capacity.replays import Bench
    from kvtune.answers.capacity.replicas import Fleets
    from kvtune.cli.views.answer import print_answer
    from kvtune.cli.views.plan import say_device
    from kvtune.cli.views.progress import ProgressView
    from kvtune.data.run.file import read_run
    from kvtune.data.run.slo import read_slo
    from kvtune.lab.setup.resolve import tokenizer_of
    from kvtune.requests.loads.sources import Sources
    from kvtune.requests.loads.spec import session_load

    if not query.workload:
        raise UsageError("give the sessions with -w", "for instance -w trace:format=weka,path=FOLDER")
    slo = read_slo(query.slo)
    share = _share(query.keep)
    cost = _cost(query.cost) if query.cost else None
    setup = _set_up(query)
    tokenizer = tokenizer_of(query.model, setup.engine_args)
    sources = Sources()
    # A wrong load is refused before vLLM starts.
    session_load(query.workload, tokenizer=tokenizer, sources=sources)
    source = ""
    if query.like is not None:
        recorded = read_run(query.like)
        if query.trust:
            options.trusting(query.like, "", recorded.header.engine.args)
        setup = setup.like(recorded, trusted=query.trust)
        source = f"like {query.like}" if setup.simulated.cost.fitted else ""
    elif not query.json:
        say_device(setup.platform)
    if cost is not None:
        setup = structs.replace(setup, device=structs.replace(setup.simulated, cost=cost))
        source = f"--cost {query.cost}"
    if slo and not source:
        raise UsageError(
            "--slo: the time of a step is not known",
            "add --like RUN of `kvtune profile`, or --cost token=MS,step=MS",
        )
    setup = setup.sized()
    question = Question(
        model=query.model,
        spec=query.workload,
        setup=setup,
        keep=share,
        cost_source=source,
        cost_by="run" if cost is None else "given",
        sessions=query.sessions,
        seeds=query.seeds,
        remedies=query.remedies,
        tokenizer=tokenizer,
        slo=slo,
        fleets=Fleets(query.replicas_up_to, query.router, query.sessions) if query.replicas_up_to else None,
    )
    with (
        lab.simulators(query.model, setup.platform) as simulators,
        ProgressView(0, query.model) as view,
    ):
        capacity = answer(
            question, partial(Bench, simulators, tokenizer=tokenizer, sources=sources), view.phase
        )
    print_answer(capacity, document(capacity), json=query.json, md=query.md, page=query.page)
    return 0


def _set_up(query: CapacityQuery) -> Setup:
    """Return the engine without what --like adds: stock vLLM, or what the recipe sets."""
    from kvtune.cli.settings import with_recipe
    from kvtune.lab.setup.setup import Setup, Simulated

    setup = Setup(
        model=query.model,
        engine_args=list(query.flags),
        device=Simulated(),
        platform=query.platform,
    )
    if not query.recipe:
        return setup
    from msgspec.structs import replace

    made = with_recipe(query.recipe, [], query.flags, model=query.model, core=None, anyway=query.anyway)
    core = made.core_settings if made.core == "kvtune" else {}
    return replace(
        setup, core=made.core, core_settings=core, engine_args=made.flags, from_recipe=sorted(made.alone)
    )


def _share(text: str) -> float:
    """Parse `90%`, `90` or `0.9`."""
    digits = text.strip().removesuffix("%").strip()
    try:
        value = float(digits)
    except ValueError:
        value = -1.0
    if value > 1 or text.strip().endswith("%"):
        value /= 100
    if not 0 < value < 1:
        raise UsageError(f"--keep {text} is not a share below 100 %", "for instance --keep 90%")
    return value


def _cost(text: str) -> StepCost:
    """Parse times in ms."""
    from kvtune.base.errors import did_you_mean
    from kvtune.lab.device.cost import StepCost

    fields = {"token": "prefill_token_us", "step": "step_us", "decode": "decode_us"}
    given: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = (word.strip() for word in part.partition("="))
        if name not in fields:
            raise UsageError(
                f"--cost: {name!r} is not known",
                f"{did_you_mean(name, fields)}give {', '.join(fields)}, in ms",
            )
        try:
            given[name] = float(value)
        except ValueError:
            given[name] = -1.0
        if not 0 <= given[name] < 1e6:
            raise UsageError(
                f"--cost: {name}={value} is not a time in ms", "for instance --cost token=0.07,step=15"
            )
    if not given.get("token") or not given.get("step"):
        raise UsageError("--cost needs token= and step=, in ms", "for instance --cost token=0.07,step=15")
    times = {fields[name]: 1000.0 * value for name, value in given.items()}
    return StepCost(**{"decode_us": 0.0, "kv_token_us": 0.0, "source": "--cost", **times})  # type: ignore[arg-type]
