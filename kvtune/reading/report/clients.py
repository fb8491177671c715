"""Compares what load generators wrote of their runs, beside kvtune's: latencies, throughput, hits, what could hit.

Nothing is judged: a result file has no figure of each request, or says nothing of the machine and the load.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from kvtune.base.units import count, percent
from kvtune.data.run.client_file import ClientResult, Times, is_client_file, read_client_file
from kvtune.data.run.file import read_run
from kvtune.data.run.signature import identity
from kvtune.data.run.types import Run
from kvtune.data.show.parts import Cell, Document, Section, grid
from kvtune.reading.analysis.comparison.compare import value_at
from kvtune.reading.analysis.figures import OBJECTIVES, quantity
from kvtune.reading.analysis.rebuild import workload_of
from kvtune.reading.analysis.run import RunAnalysis
from kvtune.reading.analysis.summary import summary
from kvtune.reading.bounds.loads import possible_hits

TIMES = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")
PARTS = ("mean", "p50", "p99")
HIT, POSSIBLE, OUTPUT = OBJECTIVES["hit-rate"], "possible_hit_rate", OBJECTIVES["throughput"]
FIGURES = (*(f"{name}.{part}" for name in TIMES for part in PARTS), OUTPUT, HIT, POSSIBLE)


class ClientSide(msgspec.Struct, frozen=True, kw_only=True):
    """One side. `figures`: by path; None: the file does not have it. `possible_hit_rate`: of a cache without limit."""

    name: str
    source: str
    model: str
    requests: int
    prompt_tokens: int | None
    output_tokens: int | None
    figures: dict[str, float | None]


def has_client_files(paths: Sequence[Path]) -> bool:
    return any(map(is_client_file, paths))


def client_sides(paths: Sequence[Path], trace: Path | None) -> list[ClientSide]:
    """Return a side for each run file and for each benchmark of a result file. `trace`: that of the first run."""
    sides: list[ClientSide] = []
    for path in paths:
        if not is_client_file(path):
            sides.append(_of_run(path.stem, read_run(path), trace))
            continue
        results = read_client_file(path)
        names = (
            [path.stem] if len(results) == 1 else [f"{path.stem} #{n}" for n in range(1, len(results) + 1)]
        )
        sides += [_of_result(name, result) for name, result in zip(names, results, strict=True)]
    return sides


def _of_result(name: str, result: ClientResult) -> ClientSide:
    figures: dict[str, float | None] = {}
    for name_of_times in TIMES:
        times: Times = getattr(result, name_of_times)
        figures |= {f"{name_of_times}.{part}": getattr(times, part) for part in PARTS}
    return ClientSide(
        name=name,
        source=result.tool,
        model=result.model,
        requests=result.requests,
        prompt_tokens=result.prompt_tokens,
        output_tokens=result.output_tokens,
        figures={
            **figures,
            OUTPUT: result.throughput_tok_s,
            HIT: result.hit_rate,
            POSSIBLE: result.possible_rate,
        },
    )


def _of_run(name: str, run: Run, trace: Path | None) -> ClientSide:
    workload = workload_of(run, trace)
    figures = summary(RunAnalysis(run))
    requests = run.table("requests")
    possible = None
    if workload is not None and workload.requests:
        hits = possible_hits(workload.requests, max(1, run.header.engine.block_size))
        possible = sum(hits) / max(1, sum(request.prompt_tokens for request in workload.requests))
    engine = run.header.engine
    return ClientSide(
        name=name,
        source=f"kvtune, {run.header.source}, vLLM {engine.vllm}",
        model=run.header.model,
        requests=len(requests["prompt_tokens"]),
        prompt_tokens=int(requests["prompt_tokens"].sum()),
        output_tokens=int(requests["output_tokens"].sum()),
        figures={path: possible if path == POSSIBLE else _value(figures, path) for path in FIGURES},
    )


def _value(figures: dict[str, object], path: str) -> float | None:
    try:
        return value_at(figures, path)
    except KeyError:
        return None  # a figure that run files do not have


def clients_document(sides: Sequence[ClientSide]) -> Document:
    names = " beside ".join(side.name for side in sides)
    rows: list[list[Cell | str]] = [
        ["source", *(side.source for side in sides)],
        ["model", *(side.model or "–" for side in sides)],
        ["requests", *(count(side.requests) for side in sides)],
        ["prompt tokens", *(_count(side.prompt_tokens) for side in sides)],
        ["output tokens", *(_count(side.output_tokens) for side in sides)],
    ]
    for path in FIGURES:
        values = [side.figures[path] for side in sides]
        if any(value is not None for value in values):
            rows.append([quantity(path).title, *map(quantity(path).text, values)])
    first = next((side for side in sides if side.figures[HIT] is not None), None)
    hits = f" {first.name} hit {percent(first.figures[HIT] or 0.0)} of its prompt tokens." if first else ""
    return Document(
        name="kvtune compare",
        subject=names,
        headline=f"{names}: {count(len(sides))} sides, nothing is judged.{hits}",
        sections=(
            Section(
                "clients",
                "What each says",
                tables=(grid(("", *(side.name for side in sides)), rows),),
                notes=(
                    "A result file does not say on which machine, with which settings and with which prompts it was "
                    "measured: whether the sides did the same is yours to know.",
                ),
            ),
        ),
        identity=identity("clients", *sides),
        title=f"{names} · kvtune",
    )


def _count(number: int | None) -> str:
    return "–" if number is None else count(number)
