"""`kvtune bounds`: what a cache of each size could hit at best, what the best policy we know hits, what LRU hits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvtune.errors import UsageError


def bounds(
    workload: Annotated[str, typer.Option("-w", "--workload", help="name or name:key=value,..")] = "",
    trace: Annotated[
        Path | None, typer.Option(help="A trace file (Mooncake JSONL, BurstGPT or Azure CSV).")
    ] = None,
    model: Annotated[
        str, typer.Option(help="A built-in model or a folder with config.json: memory, and what is relaxed.")
    ] = "",
    pools: Annotated[
        str, typer.Option(help="Pool sizes in blocks: 25k,100k,..  Default: all, and its halves.")
    ] = "",
    block_size: Annotated[int, typer.Option("--block-size", min=1, help="Tokens of a block.")] = 16,
    seed: Annotated[int, typer.Option(help="Seed of the workload.")] = 0,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on stdout, and nothing else.")
    ] = False,
) -> int:
    """Compare infinite cache, offline optimum, best known policy and LRU over pool sizes. No engine, no model."""
    from kvtune.bounds.ladder import bounds as find
    from kvtune.bounds.ladder import to_json
    from kvtune.bounds.text import parse_pools, print_bounds, progress, shape_named
    from kvtune.workload.spec import build

    if bool(workload) == (trace is not None):
        raise UsageError("give one of -w WORKLOAD and --trace FILE", "for instance --trace trace.jsonl")
    work = build(f"trace:path={trace}" if trace is not None else workload, seed=seed)
    sizes = parse_pools(pools)
    shape = shape_named(model) if model else None
    with progress() as done:
        found = find(work, sizes, block_tokens=block_size, shape=shape, done=done)
    if json:
        import msgspec

        print(msgspec.json.encode(to_json(found)).decode())
    else:
        print_bounds(found)
    return 0
