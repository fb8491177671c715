"""Replays each choice of states for a load, and says which serves it best: `States`, one small table.

Every figure is a replay's, of vLLM's own scheduler and cache. The winner is replayed again with other seeds, where the
load has any.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec
import numpy as np

from kvtune.answers.invocation import of_setup
from kvtune.answers.states.choices import Choice, Engine, at_interval, choices, fine_ends, fine_partings
from kvtune.base.commands import core_words
from kvtune.base.errors import KvtuneError
from kvtune.data.flags import flag_texts, without_overridden
from kvtune.data.knobs import DRAFTS, keeps_specs
from kvtune.data.layout.idle import Idle
from kvtune.data.run.types import Run
from kvtune.lab.setup.setup import Setup
from kvtune.requests.loads.spec import build
from kvtune.requests.types import Span, Workload

VISITS = 3
SEEDS = (1, 2)
"""Added to the load's seed: the loads with which the winner is replayed again."""
WORTH = 0.01
"""The least gain of a winner, as a share of the prompt tokens."""

Outcomes = Callable[[Iterable[Setup]], list[Run | KvtuneError]]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One choice. `kept`: which states are kept. `flags`: what it adds to the engine's. `price`: what it costs beside.

    `visits`: hit tokens of the prompts that are a beginning's first, second and third visit. `state_bytes`: the states
    that an idle conversation of `States.prompt_tokens` keeps; `fit`: how many such conversations the pool keeps;
    `tail_tokens`: the end of the prompt that is computed again when it is sent again. None: not known. `why_not`: why
    it does nothing here, or vLLM's refusal; then nothing was replayed.
    """

    kept: str
    flags: list[str]
    price: str = ""
    visits: list[int] = []
    hit_tokens: int | None = None
    state_bytes: int | None = None
    fit: int | None = None
    tail_tokens: int | None = None
    why_not: str = ""


class States(msgspec.Struct, frozen=True, kw_only=True):
    """What flags and the core keep of a model's recurrent states, for one load. The first row is the engine as it is.

    `visit_tokens`: prompt tokens of first, second and third visits; a visit counts the prompts so far that began with
    the same `block_tokens` tokens. `prompt_tokens`: of the conversation that is counted, the load's longest prompt.
    `winner`: place of the row that hits most, None: no row is worth a point. `confirmed`: seeds of the load with which
    it was replayed again, and won. `serve`: the command that serves it, or the engine as it is.
    """

    schema: int = 1
    model: str
    workload: str
    query_tokens: int
    visit_tokens: list[int]
    block_tokens: int
    prompt_tokens: int
    drafts: bool
    rows: list[Row]
    winner: int | None = None
    confirmed: list[int] = []
    why: str = ""
    serve: str = ""

    @property
    def best(self) -> Row:
        return self.rows[self.winner or 0]


def states_of(
    setup: Setup, workload: Workload, outcomes: Outcomes, *, stands_in: bool = False
) -> States | None:
    """Return the table for a simulated set-up; None for a model without recurrent states, or without prefix caching.

    `outcomes` replays. `stands_in`: the set-up's model is another with the recorded one's KV specs, so that no choice
    that changes these can be replayed.
    """
    longest = max((request.prompt_tokens for request in workload.requests), default=0)
    setup = setup.with_load(workload).replayed(idle=longest)
    (base,) = outcomes([setup])
    if isinstance(base, KvtuneError):
        raise base
    engine = engine_of(setup, base)
    if engine is None:
        return None
    every = [Choice("as it is", {}), *offered(engine)]
    if stands_in:
        every = [choice for choice in every if choice.why_not or all(map(keeps_specs, choice.settings))]
    played = [choice for choice in every[1:] if not choice.why_not]
    runs = iter(outcomes(choice.of(engine) for choice in played))
    visits = visits_of(workload, engine.block)
    results = [base, *(next(runs) if not choice.why_not else None for choice in every[1:])]
    rows = [_row(choice, engine, result, visits) for choice, result in zip(every, results, strict=True)]
    prompts = np.array([request.prompt_tokens for request in workload.requests])
    table = States(
        model=setup.model,
        workload=workload.spec,
        query_tokens=int(prompts.sum()),
        visit_tokens=_by_visit(prompts, visits),
        block_tokens=engine.block,
        prompt_tokens=longest,
        drafts=engine.drafts,
        rows=rows,
    )
    return _with_winner(table, setup, every, outcomes)


def engine_of(setup: Setup, run: Run) -> Engine | None:
    """Return what decides which states a replayed engine keeps; None without states or prefix caching."""
    info = run.header.engine
    kinds = [str(group.get("kind", "")).lower() for group in info.groups]
    if not any("mamba" in kind for kind in kinds) or info.settings.get("enable_prefix_caching") is False:
        return None
    return Engine(
        setup,
        max(int(group.get("block_size", 0)) for group in info.groups),
        int(info.settings.get("hit_alignment_tokens") or info.block_size),
        int(info.settings.get("max_num_batched_tokens") or 0),
        int(info.settings.get("max_num_seqs") or 0),
        info.pool_bytes,
    )


def offered(engine: Engine) -> Iterator[Choice]:
    """Yield the choices, and the shortest interval together with the finest ends."""
    every = at_interval(engine, engine.least_interval)
    finer = fine_partings(engine) if engine.drafts else fine_ends(engine)
    for choice in choices(engine):
        yield choice
        if choice.settings == every.settings and not finer.why_not:
            yield Choice(
                f"every {engine.least_interval:,} tokens, and {finer.kept}",
                {**every.settings, **finer.settings},
                f"{every.price}; {finer.price}",
            )


def visits_of(workload: Workload, tokens: int) -> list[int]:
    """Return for each request how many prompts up to it, with it, began with the same tokens; 0 for shorter prompts."""
    seen: Counter[tuple[Span, ...]] = Counter()
    visits = []
    for request in workload.requests:
        begin = beginning(request.prompt, tokens)
        seen[begin] += 1
        visits.append(seen[begin] if request.prompt_tokens >= tokens else 0)
    return visits


def beginning(prompt: Sequence[Span], tokens: int) -> tuple[Span, ...]:
    """Return the spans of a prompt's first tokens. Spans that continue each other are one."""
    spans: list[Span] = []
    for span in prompt:
        if tokens <= 0:
            break
        length = min(tokens, span.length)
        last = spans[-1] if spans else None
        if last is not None and last.stream == span.stream and last.start + last.length == span.start:
            spans[-1] = last._replace(length=last.length + length)
        else:
            spans.append(span._replace(length=length))
        tokens -= length
    return tuple(spans)


def _by_visit(tokens: np.ndarray, visits: Sequence[int]) -> list[int]:
    numbers = np.array(visits)
    return [int(tokens[numbers == visit].sum()) for visit in range(1, VISITS + 1)]


def _row(choice: Choice, engine: Engine, result: Run | KvtuneError | None, visits: Sequence[int]) -> Row:
    if result is None:
        return Row(kept=choice.kept, flags=choice.words.split(), price=choice.price, why_not=choice.why_not)
    added = _added(engine.setup, engine.setup.with_knobs(choice.settings))
    row = Row(kept=choice.kept, flags=added, price=choice.price)
    if isinstance(result, KvtuneError):
        return msgspec.structs.replace(row, why_not=result.message)
    hits = np.maximum(result.table("requests")["hit_tokens"], 0)
    row = msgspec.structs.replace(row, hit_tokens=int(hits.sum()), visits=_by_visit(hits, visits))
    info = result.header.engine
    if not result.header.extra.idle:
        return row
    idle = msgspec.convert(result.header.extra.idle, Idle)
    of_states = ["mamba" in str(group.get("kind", "")).lower() for group in info.groups]
    blocks = sum(kept for kept, states in zip(idle.blocks, of_states, strict=True) if states)
    return msgspec.structs.replace(
        row,
        state_bytes=blocks * (info.pool_bytes // info.num_blocks),
        fit=idle.conversations,
        tail_tokens=idle.prompt_tokens - idle.hit_tokens,
    )


def _added(setup: Setup, changed: Setup) -> list[str]:
    """Return the words that a choice adds, of flags or of the core, or takes away: those with `no` before them."""
    old, new = flag_texts(setup.engine_args), flag_texts(changed.engine_args)
    words = [word for name, value in new.items() if old.get(name) != value for word in (f"--{name}", value)]
    gone = [f"no --{name}" for name in old if name not in new]
    of_core = {
        name: value for name, value in changed.core_settings.items() if setup.core_settings.get(name) != value
    }
    return [*filter(None, words), *gone, *core_words(of_core)]


def _with_winner(table: States, setup: Setup, every: Sequence[Choice], outcomes: Outcomes) -> States:
    """Return the table with its winner. Drafts are not turned on or off by it: they are there for speed."""
    rows = table.rows
    now = rows[0].hit_tokens or 0
    able = [n for n, row in enumerate(rows) if row.hit_tokens is not None and DRAFTS not in every[n].settings]
    best = max(able, key=lambda n: (rows[n].hit_tokens or 0, -n))
    if (rows[best].hit_tokens or 0) - now < WORTH * table.query_tokens:
        why = "no winner: no setting brings a point of hits"
        return msgspec.structs.replace(table, why=why, serve=_serve(setup))
    chosen = setup.with_knobs(every[best].settings)
    loads = list(_other_loads(setup))
    pairs = [each.with_load(load) for load in loads for each in (setup, chosen)]
    results = outcomes(pairs) if pairs else []
    confirmed = []
    for number, load in enumerate(loads):
        before, after = results[2 * number : 2 * number + 2]
        if isinstance(before, KvtuneError) or isinstance(after, KvtuneError):
            continue
        if _hits(after) - _hits(before) >= WORTH * load.prompt_tokens:
            confirmed.append(load.seed)
    if len(confirmed) < len(loads):
        why = f"no winner: the best row wins with {len(confirmed)} of {len(loads)} other seeds"
        return msgspec.structs.replace(table, why=why, serve=_serve(setup))
    why = f"confirmed with {len(loads)} other seeds" if loads else "replayed for this load, which has no seed"
    return msgspec.structs.replace(table, winner=best, confirmed=confirmed, why=why, serve=_serve(chosen))


def _other_loads(setup: Setup) -> Iterator[Workload]:
    """Yield the load with other seeds; nothing where the seed changes nothing, as with a log."""
    load = setup.load
    for more in SEEDS:
        other = build(load.spec, seed=load.seed + more)
        if other.hash != load.hash:
            yield other


def _hits(run: Run) -> int:
    return int(np.maximum(run.table("requests")["hit_tokens"], 0).sum())


def _serve(setup: Setup) -> str:
    """Return the command that serves it, with kvtune's core only if it takes part."""
    if not setup.core_settings:
        setup = msgspec.structs.replace(setup, core="stock")
    flags = without_overridden(setup.engine_args)
    device = setup.platform.kind if setup.platform is not None else ""
    return of_setup(msgspec.structs.replace(setup, engine_args=flags)).serve(device)
