"""`kvtune diff`: what another version of vLLM changes, before it is deployed."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from kvtune.base.errors import EXIT_FAILED, UsageError
from kvtune.cli import options
from kvtune.cli.query import Flags, Lab, Query, When, argument, option

if TYPE_CHECKING:
    from kvtune.data.platforms import Platform


MOST_MODELS, LONGEST_NAME = 100, 1_000
REPLAYED = When("a load of MODEL, which both versions' schedulers get", model=True)


@dataclass(frozen=True, kw_only=True)
class DiffQuery(Query):
    old: str = argument(MISSING, "OLD")("""A version of vLLM, which is installed once; the folder of an
        environment; or a checkout of vLLM. What a folder has is run.""")
    new: str = argument(MISSING, "NEW")("Another.")
    model: str | None = argument(None, When("one model", models=False))("""A built-in model, a folder with
        config.json, or a name on the hub. Default: the shapes of reports/evidence/models.md.""")
    models: Path | None = option(None, "FILE", When("a list of models", model=False))("""A file with a model
        a line.""")
    workload: Annotated[options.Workload, REPLAYED] = ""
    seed: Annotated[options.Seed, When("of the load", workload=True)] = 0
    platform: options.LikeDevice = None
    fail_on: str = option("")("""Exit 1 if this holds for a model: 'hits < -2 points', 'pool_tokens < -5 %',
        'gone > 0'.""")
    page: options.Page = None
    json: options.Json = False
    md: options.Md = False
    flags: Flags = ()


def diff(query: DiffQuery, lab: Lab) -> int:
    """Compare two versions of vLLM: blocks, hits, pools, defaults, names, and how they take a load. Needs no GPU.

    Exit code: 1 if --fail-on holds. vLLM's own flags go after `--`, to both.
    """
    from msgspec.structs import replace

    from kvtune.answers.diff.asking import asked
    from kvtune.answers.diff.differences import broken, compare, refuse_unanswered
    from kvtune.answers.diff.document import document
    from kvtune.answers.diff.environments import environment, place
    from kvtune.answers.diff.replays import replayed
    from kvtune.answers.diff.result import Diff
    from kvtune.cli.views.answer import print_answer
    from kvtune.cli.views.plan import begin
    from kvtune.lab.setup.platform import engines
    from kvtune.lab.setup.resolve import resolve
    from kvtune.lab.setup.setup import Setup
    from kvtune.reading.analysis.comparison.fail_on import parse_fail_on

    condition = parse_fail_on(query.fail_on.replace(" points", "")) if query.fail_on else None
    names = _models(query)
    if query.model is not None:
        resolve(query.model, dummy=True, engine_args=query.flags)  # a wrong name fails at once
    platform = query.platform or _own_gpu()
    device = engines(platform).title
    if (version := place(query.old)) == place(query.new):
        answer = Diff(old=version, new=version, device=device)
        print_answer(answer, document(answer), json=query.json, md=query.md, page=query.page)
        return 0
    environments = [environment(named, begin) for named in (query.old, query.new)]
    begin(f"asking both about {len(names)} model{'s' if len(names) != 1 else ''} as on {device}")
    setups = [Setup(model=name, engine_args=list(query.flags), platform=platform) for name in names]
    old, new = asked(environments, setups)
    refuse_unanswered(old, new)
    load = None
    if query.workload:
        begin(f"replaying {query.workload} through both schedulers")
        load = replayed(lab, environments, (old, new), setups[0], query.workload, query.seed)
    answer = compare(old, new, device, load)
    try:
        answer = replace(answer, broken=broken(answer, condition) if condition is not None else [])
    finally:  # also where the limit is of what is unknown
        print_answer(answer, document(answer), json=query.json, md=query.md, page=query.page)
    return EXIT_FAILED if answer.broken else 0


def _own_gpu() -> Platform | None:
    """Return this machine's GPU as a device that both are asked as; None for a CPU."""
    from kvtune.data import platforms
    from kvtune.lab.setup.platform import here

    own = here()
    if own.kind == "cpu" or not own.memory_bytes:
        return None
    listed = next((device for device in platforms.DEVICES.values() if device.name == own.name), None)
    return listed or platforms.device(f"{own.memory_bytes / platforms.GIB:.3f}GiB")


def _models(query: DiffQuery) -> list[str]:
    from kvtune.base.files import read_regular
    from kvtune.data.layout.models import SHAPES
    from kvtune.data.show.terminal import one_line

    if query.models is None:
        return [query.model] if query.model is not None else list(SHAPES)
    try:
        lines = read_regular(query.models, 1 << 20).decode(errors="replace").splitlines()
    except OSError as error:
        why = error.strerror or error
        raise UsageError(f"cannot read {query.models}: {why}", "give a file with a model a line") from None
    names = list(dict.fromkeys(line.strip() for line in lines if line.strip()))
    if not names or len(names) > MOST_MODELS:
        what = f"{len(names):,} models; {MOST_MODELS} are asked about at most" if names else "no model"
        raise UsageError(f"{query.models} names {what}", "give a file with a model a line")
    if wrong := [name for name in names if not name.isprintable() or len(name) > LONGEST_NAME]:
        raise UsageError(
            f"{one_line(wrong[0])[:80]!r} is the name of no model", "give a file with a model a line"
        )
    return names
