"""`kvtune bounds`: what a load is, and hit rates of an infinite cache, the optimum, our best policy and LRU."""

from __future__ import annotations

from dataclasses import dataclass

from kvtune.base.errors import UsageError
from kvtune.cli import options
from kvtune.cli.query import Query, option


@dataclass(frozen=True, kw_only=True)
class BoundsQuery(Query):
    workload: options.Workload = ""
    trace: options.Trace = None
    model: str = option("")("""A built-in model or a folder with config.json: adds the memory of each pool
        size, and says where the model's bounds are looser than exact.""")
    pools: str = option("")("""Pool sizes in blocks: 25k,100k,..  Default: the size that holds everything,
        halved repeatedly.""")
    tier: str = option("")("""Sizes of a tier of host memory, as multiples of each pool: 1x,2x,4x,8x. Adds
        what an inclusive tier (vLLM's) and an exclusive one would hit.""")
    block_size: int = option(16, min=1)("Tokens per block.")
    seed: options.Seed = 0
    json: options.Json = False
    md: options.Md = False
    page: options.Page = None


def bounds(query: BoundsQuery) -> int:
    """Describe a load, and what an infinite cache, the optimum, our best policy and LRU hit of it. Starts no engine."""
    from kvtune.cli.views.answer import print_answer
    from kvtune.lab.setup.resolve import tokenizer_of
    from kvtune.reading.bounds.document import bounds_document
    from kvtune.reading.bounds.given import parse_pools, parse_tiers, progress, shape_named
    from kvtune.reading.bounds.ladder import bounds as compute
    from kvtune.reading.bounds.loads import session_facts
    from kvtune.requests.loads.sources import Sources
    from kvtune.requests.loads.spec import build, parsed, session_load

    if not query.workload and query.trace is None:
        raise UsageError("give one of -w WORKLOAD and --trace FILE", "for instance --trace trace.jsonl")
    spec = f"trace:path={query.trace}" if query.trace is not None else query.workload
    tokenizer, sources = tokenizer_of(query.model), Sources()
    work = build(spec, seed=query.seed, tokenizer=tokenizer, sources=sources)
    sizes, tiers = parse_pools(query.pools), parse_tiers(query.tier)
    shape = shape_named(query.model) if query.model else None
    sessions, notes = None, []
    if parsed(spec, query.seed)[0].loader is not None:
        try:
            load = session_load(spec, seed=query.seed, tokenizer=tokenizer, sources=sources)
            sessions = session_facts(load, query.block_size)
        except UsageError as error:  # a load whose requests are no sessions
            notes.append(f"no sessions: {error.message}")
    with progress() as done:
        ladder = compute(
            work,
            sizes,
            block_tokens=query.block_size,
            shape=shape,
            tiers=tiers,
            sessions=sessions,
            load_notes=notes,
            done=done,
        )
    print_answer(ladder, bounds_document(ladder), json=query.json, md=query.md, page=query.page)
    return 0
