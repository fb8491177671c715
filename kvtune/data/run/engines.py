"""A run of several engines (`--data-parallel-size`), each with its own scheduler and KV cache. Pure."""

from __future__ import annotations

import re

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvtune.data.run.types import ProcessInfo, Run, Table

_RANK = re.compile(r"EngineCore_DP(\d+)")

BY_PROCESS = ("steps", "pool")
"""Tables that only EngineCores write."""


def rank_of(process: ProcessInfo) -> int:
    """Return an EngineCore's data-parallel rank, which vLLM puts into the process's name; 0 if it has none."""
    match = _RANK.search(process.name)
    return int(match[1]) if match else 0


def ranks(run: Run) -> list[int]:
    """Return the ranks of the run's EngineCores; [0] if it had one, or recorded none."""
    ranks = {rank_of(p) for p in run.header.processes if p.role == "engine_core"}
    return sorted(ranks) or [0]


def served_by(run: Run, rank: int) -> NDArray[np.bool_]:
    """Return, for each request in workload order, whether this engine served it."""
    requests = run.table("requests")
    if len(ranks(run)) == 1:
        return np.ones(len(requests["id"]), bool)
    return np.asarray(requests["engine"] == rank)


def of_engine(run: Run, rank: int) -> Run:
    """Return the run with only this engine's steps, pool rows and tokens; other engines' requests count as not sent."""
    if len(ranks(run)) == 1:
        return run
    indexes = [
        i for i, p in enumerate(run.header.processes) if p.role == "engine_core" and rank_of(p) == rank
    ]
    served = served_by(run, rank)
    tables = dict(run.tables)
    for name in BY_PROCESS:
        tables[name] = _rows(run.table(name), np.isin(run.table(name)["process"], indexes))
    tokens = run.table("tokens")
    tables["tokens"] = _rows(tokens, served[tokens["request"]])
    sent = run.table("requests")["sent_s"]
    tables["requests"] = {**run.table("requests"), "sent_s": np.where(served, sent, np.nan)}
    return Run(msgspec.structs.replace(run.header), tables)


def _rows(table: Table, chosen: NDArray[np.bool_]) -> Table:
    return {name: column[chosen] for name, column in table.items()}
