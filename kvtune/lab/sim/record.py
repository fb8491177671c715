"""Makes a run from a replay's journal: the tables of a real run, with source "sim". Simulator's process only."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvtune.base.masking import without_secrets
from kvtune.data.flags import settings_given
from kvtune.data.platforms import BY_MEMORY, origins
from kvtune.data.run.extras import Extras, FleetInfo, Replay
from kvtune.data.run.machine import origin
from kvtune.data.run.types import (
    TABLES,
    CoreInfo,
    EngineInfo,
    Header,
    ProcessInfo,
    Run,
    Table,
    Validity,
    empty_table,
    table_of,
    table_of_rows,
)
from kvtune.lab.engine.config import describe_engine, jsonable
from kvtune.lab.engine.rings import records_table
from kvtune.lab.setup.setup import Setup
from kvtune.lab.sim.engine_types import EngineCore
from kvtune.lab.sim.journal import STEP_COLUMNS, ReplayJournal
from kvtune.plugin.core.state import CoreState, merged
from kvtune.requests.types import Workload


@dataclass(frozen=True, slots=True)
class Played:
    """What one engine of a replay leaves. `core`: what its core recorded."""

    journal: ReplayJournal
    engine: EngineCore
    core: CoreState


def record(
    played: Sequence[Played],
    workload: Workload,
    setup: Setup,
    now_s: float,
    *,
    why: str,
    startup_s: float,
    elapsed_s: float,
) -> Run:
    """Return the finished replay as a run. `now_s`: when it ended. `why`: why it ended early, or "".

    Several engines are recorded as those of a run with `--data-parallel-size`.
    """
    leave_s = setup.simulated.cost.leave_us * 1e-6
    journals = [member.journal for member in played]
    requests = _requests(journals, workload, leave_s)
    tables = {
        "requests": requests,
        "steps": _of_all("steps", [_steps(journal) for journal in journals]),
        "pool": _of_all(
            "pool", [table_of_rows("pool", [(0, *row) for row in journal.pool]) for journal in journals]
        ),
        "tokens": _joined([_tokens(journal, leave_s) for journal in journals]),
    }
    if journals[0].copies is not None:
        copies = [[(0, each.start_ns / 1e9, each) for each in journal.copies or ()] for journal in journals]
        tables["copies"] = _of_all("copies", [records_table("copies", timed) for timed in copies])
    ends = tables["steps"]["t_s"] + tables["steps"]["step_us"] * 1e-6
    finished = np.isfinite(requests["finished_s"])
    admitted = requests["hit_tokens"] >= 0
    engine, core = played[0].engine, merged([member.core for member in played])
    facts = jsonable(describe_engine(engine.vllm_config))
    model_config = facts.pop("model_config")
    extra = Extras(
        sim=Replay(
            steps=len(tables["steps"]["t_s"]),
            jumps=sum(journal.jumps for journal in journals),
            jumped_steps=sum(journal.jumped_steps for journal in journals),
            elapsed_s=elapsed_s,
            batch_queue=engine.batch_queue is not None,
        ),
        step_cost=msgspec.to_builtins(setup.simulated.cost),
        digests=[value for journal in journals for value in journal.digests]
        if setup.simulated.digests
        else [],
        computed_twice=_computed_twice(journals),
        fleet=FleetInfo(replicas=len(played), router=setup.simulated.router)
        if setup.simulated.router
        else None,
    )
    header = Header(
        **origin(sys.argv, why),
        source="sim",
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
        model=setup.model,
        model_config=model_config,
        workload=workload.info,
        core=CoreInfo.reported(setup.core, setup.core_settings, core),
        engine=msgspec.structs.replace(
            _engine(facts, engine, setup, journals[0].queues), engines=len(played)
        ),
        processes=[
            ProcessInfo(
                pid=1 + rank,
                role="engine_core",
                name="simulated" if len(played) == 1 else f"simulated EngineCore_DP{rank}",
            )
            for rank in range(len(played))
        ],
        valid=_validity(setup),
        wall_s=min(now_s, float(ends.max(initial=0.0)))
        if why
        else now_s,  # up to the last step if it ended early
        startup_s=startup_s,
        engine_counters={
            "finished": int(finished.sum()),
            "hits": int(requests["hit_tokens"][admitted].sum()),
            "queries": int(requests["prompt_tokens"][admitted].sum()),
            "prompt_tokens": int(requests["prompt_tokens"][finished].sum()),
            "generation_tokens": int(requests["output_tokens"].sum()),
        },
        notes=core["notes"] if setup.core == "kvtune" and core is not None else [],
        extra=extra,
    )
    return Run(header, tables)


def _computed_twice(journals: Sequence[ReplayJournal]) -> dict[str, dict[str, int]]:
    """Return the tokens computed twice after preemptions, by the row of the request and cause."""
    twice: dict[str, dict[str, int]] = {}
    for journal in journals:
        journal.preempted.close()
        twice |= journal.preempted.twice
    return {row: twice[row] for row in sorted(twice, key=int)}


def _requests(journals: Sequence[ReplayJournal], workload: Workload, leave_s: float) -> Table:
    """Return the requests, each with what the journal of its engine says of it."""
    planned = workload.requests
    columns = {
        name: getattr(journals[0], name).copy()
        for name in ("output", "hits", "tier_hits", "sent_s", "first_s", "finished_s", "preemptions")
    }
    engine: NDArray[np.int16] = np.zeros(len(planned), "i2")
    for rank, journal in enumerate(journals[1:], start=1):
        served = np.isfinite(journal.sent_s)
        engine[served] = rank
        for name, column in columns.items():
            column[served] = getattr(journal, name)[served]
    finished = np.isfinite(columns["finished_s"])
    return {
        "id": np.array([r.id for r in planned], dtype=np.str_),
        "kind": np.array([r.kind for r in planned], dtype=np.str_),
        "round": np.array([r.round for r in planned], "i4"),
        "prompt_tokens": np.array([r.prompt_tokens for r in planned], "i8"),
        "output_tokens": columns["output"],
        "hit_tokens": columns["hits"],
        "tier_hit_tokens": columns["tier_hits"],
        "planned_s": np.array([np.nan if r.arrival_s is None else r.arrival_s for r in planned], "f8"),
        "sent_s": columns["sent_s"],
        "first_token_s": columns["first_s"] + leave_s,
        "finished_s": columns["finished_s"] + leave_s,
        "finish": np.where(finished, "length", ""),
        "answer_crc": np.zeros(len(planned), "i8"),
        "preemptions": columns["preemptions"],
        "engine": engine,
    }


def _of_all(name: str, tables: Sequence[Table]) -> Table:
    """Return the engines' rows, in the order of their times, with the number of the engine's process."""
    if len(tables) == 1:
        return tables[0]
    kind = TABLES[name]["process"]
    numbered = [
        {**table, "process": np.full(len(table["t_s"]), rank, kind)} for rank, table in enumerate(tables)
    ]
    whole = _joined(numbered)
    order = np.argsort(whole["t_s"], kind="stable")
    return {column: values[order] for column, values in whole.items()}


def _joined(tables: Sequence[Table]) -> Table:
    return {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}


def _tokens(journal: ReplayJournal, leave_s: float) -> Table:
    if not len(journal.token_s):
        return empty_table("tokens")
    rows = np.frombuffer(journal.token_request, "i4").copy()
    return {
        "request": rows,
        "t_s": np.frombuffer(journal.token_s, "f8") + leave_s,
        "made_s": np.frombuffer(journal.token_s, "f8").copy(),
        "count": np.ones(len(rows), "i4"),
    }


def _steps(journal: ReplayJournal) -> Table:
    """Return the steps table. The simulated host takes no time: execution fills each step, the host's columns are 0."""
    rows = np.frombuffer(journal.steps).reshape(-1, len(STEP_COLUMNS))
    columns = dict(zip(STEP_COLUMNS, rows.T, strict=True))
    duration_us = (columns["end_s"] - columns["t_s"]) * 1e6
    waits_us = np.full(len(rows), np.nan)
    times = {"step_us": duration_us, "execute_us": duration_us, "wait_us": waits_us, "device_us": duration_us}
    return table_of("steps", columns | times)


def _engine(facts: dict[str, Any], engine: EngineCore, setup: Setup, queues: Sequence[str]) -> EngineInfo:
    from kvtune.plugin.probe.describe import describe_cache

    where = str(facts["device_name"] or facts["device"])
    if (like := setup.platform) is not None:
        where = like.title
        facts |= {"device": like.kind, "device_name": like.name, "like_device": like.key}
    cache = {
        **describe_cache(engine.scheduler, engine.model_executor.get_kv_cache_specs()),
        "tiers": list(queues),
    }
    decided = origins(settings_given(setup.engine_args), frozenset(setup.from_recipe), where)
    if setup.by_memory:
        decided["num_blocks"] = BY_MEMORY
    info = msgspec.convert(
        {**facts, "executor": "sim", "args": without_secrets(setup.engine_args), "origins": decided},
        EngineInfo,
    )
    return info.with_cache(cache)


def _validity(setup: Setup) -> Validity:
    cost = setup.simulated.cost
    if not cost.fitted:
        return Validity(
            timings=False, why="simulated on a nominal step cost: only the order of events means anything"
        )
    if cost.clock == "requests":
        return Validity(
            timings=cost.trusted,
            why=f"predicted, from a step cost fitted to the times of a server's requests (one is off by "
            f"{cost.error_share:.0%} in the middle; {cost.held_out_share:.0%} between the first and the later ones, "
            f"{cost.unexplained_share:.0%} of all their time not explained)",
        )
    return Validity(
        timings=cost.trusted,
        why=f"predicted, from a step cost fitted on {cost.machine} (mean error {cost.error_share:.0%} of a step, "
        f"{cost.held_out_share:.0%} off on steps it was not fitted to, {cost.unexplained_share:.0%} of the time in "
        f"flight not explained, {cost.steps} steps)",
    )
