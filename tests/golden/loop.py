"""A toy engine's step loop: the tables of a run whose requests are given. Nothing here is a measurement."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvtune.data.run.types import TABLES, Table

CHUNK = 2048


def whole(name: str, table: Table) -> Table:
    """With the kinds of the record, and its columns that this loop knows nothing of as a reader fills them."""
    rows = len(next(iter(table.values())))
    by_name = {}
    for column, kind in TABLES[name].items():
        if column in table:
            by_name[column] = table[column] if kind == "U" else table[column].astype(kind)
        else:
            fill = np.nan if kind == "f8" else ("" if kind == "U" else 0)
            by_name[column] = np.full(rows, fill, dtype="U1" if kind == "U" else kind)
    return by_name


def engine_loop(
    prompts: Any,
    outputs: Any,
    hits: Any,
    arrivals: Any,
    rounds: Any,
    kinds: list[str],
    speed: float,
    seed: int,
) -> dict[str, Table]:
    """A toy engine: chunked prefill, then decode; step time linear in its work, noise and collections."""
    rng = np.random.default_rng(seed)
    n = len(prompts)
    to_prefill = prompts - hits
    sent, first, done = np.full(n, np.nan), np.full(n, np.nan), np.full(n, np.nan)
    left, produced = to_prefill.copy(), np.zeros(n, dtype=int)
    steps: list[tuple[float, ...]] = []
    tokens: list[tuple[int, float, int]] = []
    gc: list[tuple[float, ...]] = []
    now, upcoming, running, survivors = 0.0, 0, [], 0
    while upcoming < n or running:
        while upcoming < n and ((not running) if arrivals is None else (arrivals[upcoming] <= now)):
            sent[upcoming] = now if arrivals is None else arrivals[upcoming]
            running.append(upcoming)
            upcoming += 1
        if not running:
            now = float(arrivals[upcoming])
            continue
        budget, prefill, decodes, took = CHUNK, 0, 0, []
        for r in running[:128]:
            if left[r] > 0:
                part = min(int(left[r]), budget)
                left[r] -= part
                budget -= part
                prefill += part
                if part and left[r] == 0:
                    took.append(r)
            else:
                decodes += 1
                took.append(r)
        context = int(sum(prompts[r] + produced[r] for r in running[:128]))
        execute = (2500 + 22 * prefill + 55 * decodes + context * 0.01) / speed * rng.lognormal(0, 0.06)
        schedule, update = 90 + 6 * len(running) * rng.lognormal(0, 0.1), 40 + 4.0 * len(running)
        survivors += 40 + len(running)
        for process, period in ((1, 700), (0, 2100)):
            if survivors % period < 40 + len(running):
                generation = int(rng.choice(3, p=(0.9, 0.085, 0.015)))
                pause = (110.0, 620.0, 9000.0)[generation] * rng.lognormal(0, 0.3)
                gc.append((process, now, generation, pause, pause * 0.98, 120, 0))
                execute += pause if process == 1 else 0
        step = execute + schedule + update
        steps.append(
            (
                1,
                now,
                step,
                schedule,
                execute,
                update,
                schedule + update + 300,
                prefill + decodes,
                prefill,
                len(running),
                len(running),
                max(0, len(running) - 128),
                max(0, 8000 - context // 32),
                context,
            )
        )
        now += step / 1e6
        for r in took:
            if produced[r] == 0:
                first[r] = now
            produced[r] += 1
            tokens.append((r, now, 1))
            if produced[r] >= outputs[r]:
                done[r] = now
        running = [r for r in running if produced[r] < outputs[r]]
    columns = (
        "process",
        "t_s",
        "step_us",
        "schedule_us",
        "execute_us",
        "update_us",
        "cpu_us",
        "scheduled_tokens",
        "prefill_tokens",
        "requests",
        "running",
        "waiting",
        "free_blocks",
        "context_tokens",
    )
    memory = [
        (p, t, (base + grow * t / max(now, 1e-9)) * 2**20, 0, t * share, threads)
        for p, base, grow, share, threads in (
            (0, 900, 30, 0.2, 40),
            (1, 1400, 160, 0.97, 25),
            (2, 2100, 20, 0.9, 60),
        )
        for t in np.linspace(0, now, 40)
    ]
    return {
        "requests": {
            "id": np.array([f"r{i}" for i in range(n)]),
            "kind": np.array(kinds),
            "round": rounds.astype("i4"),
            "prompt_tokens": prompts.astype("i8"),
            "output_tokens": produced.astype("i8"),
            "hit_tokens": hits.astype("i8"),
            "planned_s": np.full(n, np.nan) if arrivals is None else arrivals,
            "sent_s": sent,
            "first_token_s": first,
            "finished_s": done,
            "finish": np.array(["length"] * n),
            "preemptions": np.zeros(n, dtype="i4"),
        },
        "tokens": table(tokens, ("request", "t_s", "count")),
        "steps": table(steps, columns),
        "gc": table(gc, ("process", "t_s", "generation", "pause_us", "cpu_us", "collected", "uncollectable")),
        "memory": table(memory, ("process", "t_s", "rss_bytes", "uss_bytes", "cpu_s", "threads")),
    }


def table(rows: list[Any], columns: tuple[str, ...]) -> Table:
    return {
        c: np.array([row[i] for row in rows], dtype=None if rows else "f8") for i, c in enumerate(columns)
    }
