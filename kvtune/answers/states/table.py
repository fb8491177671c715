"""Replays each change of what is kept of states for a load, and says which serves it best: `States`, one small table.

Every figure is a replay's, of vLLM's own scheduler and cache. The winner is replayed again with other seeds, where the
load has any.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import msgspec
import numpy as np

from kvtune.answers.changes import Change, Situation, changes, serving, situation
from kvtune.answers.invocation import of_setup
from kvtune.base.errors import KvtuneError
from kvtune.data.flags import without_overridden
from kvtune.data.knobs import CORE, DRAFTS
from kvtune.data.layout.idle import Idle
from kvtune.data.run.types import Run
from kvtune.lab.setup.setup import Setup
from kvtune.reading.analysis.replayed import WORTH_SHARE
from kvtune.requests.loads.prefix_tree import joined
from kvtune.requests.loads.spec import build
from kvtune.requests.types import Span, Workload

VISITS = 3
STEPS = "max_num_batched_tokens"
SEEDS = (1, 2)
"""Added to the load's seed: the loads with which the winner is replayed again, if the seed changes anything."""

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

    `outcomes` replays. `stands_in`: the set-up's model is another with the recorded one's KV specs, so that no change
    of these can be replayed.
    """
    longest = max((request.prompt_tokens for request in workload.requests), default=0)
    setup = setup.with_load(workload).replayed(idle=longest)
    (base,) = outcomes([setup])
    if isinstance(base, KvtuneError):
        raise base
    here = situation(setup, base.header.engine, stands_in=stands_in, load=workload)
    if not here.states or base.header.engine.settings.get("enable_prefix_caching") is False:
        return None
    every = [Change("as it is", setup, kept="as it is"), *offered(here)]
    runs = iter(outcomes(change.setup for change in every[1:] if not change.why_not))
    visits = visits_of(workload, here.state_block)
    results = [base, *(next(runs) if not change.why_not else None for change in every[1:])]
    rows = [_row(change, here, result, visits) for change, result in zip(every, results, strict=True)]
    prompts = np.array([request.prompt_tokens for request in workload.requests])
    table = States(
        model=setup.model,
        workload=workload.spec,
        query_tokens=int(prompts.sum()),
        visit_tokens=_by_visit(prompts, visits),
        block_tokens=here.state_block,
        prompt_tokens=longest,
        drafts=here.drafts,
        rows=rows,
    )
    return _with_winner(table, every, outcomes)


def offered(here: Situation) -> list[Change]:
    """Return what decides which states are kept: flags, then the core, then drafts, then what does nothing anywhere."""

    def place(change: Change) -> tuple[bool, bool, bool]:
        return not change.kept, DRAFTS in change.settings, not CORE.keys().isdisjoint(change.settings)

    return sorted((change for change in changes(here) if change.kept is not None), key=place)


def visits_of(workload: Workload, tokens: int) -> list[int]:
    """Return for each request how many prompts up to it, with it, began with the same tokens; 0 for shorter prompts."""
    seen, visits = Counter[tuple[Span, ...]](), []
    for request in workload.requests:
        begin = tuple(joined(request.prompt, tokens))
        seen[begin] += 1
        visits.append(seen[begin] if request.prompt_tokens >= tokens else 0)
    return visits


def _by_visit(tokens: np.ndarray, visits: Sequence[int]) -> list[int]:
    numbers = np.array(visits)
    return [int(tokens[numbers == visit].sum()) for visit in range(1, VISITS + 1)]


def _row(change: Change, here: Situation, result: Run | KvtuneError | None, visits: Sequence[int]) -> Row:
    row = Row(
        kept=change.kept or "", flags=serving(change, here.setup), price=change.cost, why_not=change.why_not
    )
    if result is None:
        return row
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


def _with_winner(table: States, every: Sequence[Change], outcomes: Outcomes) -> States:
    """Return the table with its winner; of equal ones, one whose steps are as long as now.

    Drafts are not turned on or off by it: they are there for speed.
    """
    rows, setup = table.rows, every[0].setup
    able = [n for n, row in enumerate(rows) if row.hit_tokens is not None and DRAFTS not in every[n].settings]
    best = max(able, key=lambda n: (rows[n].hit_tokens or 0, STEPS not in every[n].settings, -n))
    no_winner = msgspec.structs.replace(table, serve=_serve(setup))
    if (rows[best].hit_tokens or 0) - (rows[0].hit_tokens or 0) < WORTH_SHARE * table.query_tokens:
        return msgspec.structs.replace(no_winner, why="no winner: no setting brings a point of hits")
    seeded = (build(setup.load.spec, seed=setup.load.seed + more) for more in SEEDS)
    loads, chosen = [load for load in seeded if load.hash != setup.load.hash], every[best].setup
    results = outcomes(each.with_load(load) for load in loads for each in (setup, chosen)) if loads else []
    hits = [None if isinstance(result, KvtuneError) else _hits(result) for result in results]
    confirmed = [
        load.seed
        for load, before, after in zip(loads, hits[::2], hits[1::2], strict=True)
        if before is not None and after is not None and after - before >= WORTH_SHARE * load.prompt_tokens
    ]
    if len(confirmed) < len(loads):
        why = f"no winner: the best row wins with {len(confirmed)} of {len(loads)} other seeds"
        return msgspec.structs.replace(no_winner, why=why)
    why = f"confirmed with {len(loads)} other seeds" if loads else "replayed for this load, which has no seed"
    return msgspec.structs.replace(table, winner=best, confirmed=confirmed, why=why, serve=_serve(chosen))


def _hits(run: Run) -> int:
    return int(np.maximum(run.table("requests")["hit_tokens"], 0).sum())


def _serve(setup: Setup) -> str:
    """Return the command that serves it, with kvtune's core only if it takes part."""
    if not setup.core_settings:
        setup = msgspec.structs.replace(setup, core="stock")
    flags = without_overridden(setup.engine_args)
    device = setup.platform.kind if setup.platform is not None else ""
    return of_setup(msgspec.structs.replace(setup, engine_args=flags)).serve(device)
