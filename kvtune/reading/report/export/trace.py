"""A run as a Chrome trace (JSON), which Perfetto and chrome://tracing open: all processes on one time axis.

Tracks: EngineCore's steps with their phases, collections of every process, counters (requests, free blocks, blocks
evicted since the start, RSS), and each request from sending to its end. Times in microseconds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping

from kvtune.data.run.signature import run_identity, signature
from kvtune.data.run.types import Run, Table
from kvtune.reading.report.names import process_name

STEPS, COLLECTIONS = 1, 2
UNKNOWN_PID = 1_000_000  # the pid of process 0 if it is not in the header, of process 1 plus 1, and so on
Event = dict[str, object]


def chrome_trace(run: Run) -> dict[str, object]:
    """Return the trace as one JSON object of the Trace Event Format."""
    events: list[Event] = []
    for process in process_numbers(run):
        events += _names(run, process)
        events += _steps(run, process)
        events += _collections(run, process)
    events += _step_counters(run)
    events += _pool_counters(run)
    events += _memory_counters(run)
    events += _requests(run)
    h = run.header
    about = {
        "made_by": signature(run_identity(h)),
        "model": h.model,
        "workload": h.workload.spec,
        "source": h.source,
        "kvtune": h.kvtune,
        "state": h.state,
    }
    return {"otherData": about, "displayTimeUnit": "ms", "traceEvents": events}


def _pid(run: Run, process: int) -> int:
    processes = run.header.processes
    return processes[process].pid if 0 <= process < len(processes) else UNKNOWN_PID + process


def _names(run: Run, process: int) -> list[Event]:
    pid = _pid(run, process)
    threads = {STEPS: "steps", COLLECTIONS: "garbage collections"}
    named = [_meta("process_name", pid, 0, {"name": process_name(run, process)})]
    named += [_meta("process_sort_index", pid, 0, {"sort_index": process})]
    return named + [_meta("thread_name", pid, tid, {"name": name}) for tid, name in threads.items()]


def _meta(name: str, pid: int, tid: int, args: dict[str, object]) -> Event:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args}


def _span(place: Event, name: str, start_us: float, end_us: float, args: Mapping[str, float] = {}) -> Event:
    """Return a named span, in microseconds on the run's clock. `args`: figures for its tooltip."""
    times = {"ts": round(start_us, 3), "dur": round(end_us - start_us, 3)}
    return {"ph": "X", "name": name, **place, **times, "args": args}


def _counter(name: str, pid: int, t_s: float, values: dict[str, float]) -> Event:
    return {"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": round(t_s * 1e6, 3), "args": values}


def _step_counters(run: Run) -> list[Event]:
    steps = run.table("steps")
    events = []
    for i in range(len(steps["t_s"])):
        pid, t_s = _pid(run, int(steps["process"][i])), float(steps["t_s"][i])
        queue: dict[str, float] = {name: int(steps[name][i]) for name in ("running", "waiting")}
        events.append(_counter("requests", pid, t_s, queue))
        events.append(_counter("free KV blocks", pid, t_s, {"blocks": int(steps["free_blocks"][i])}))
    return events


def _pool_counters(run: Run) -> list[Event]:
    """Count evictions since the start, for each row of `pool`. Viewers keep a counter's value until its next event."""
    pool = run.table("pool")
    totals: Counter[int] = Counter()
    events: list[Event] = []
    for i in range(len(pool["t_s"])):
        pid, t_s = _pid(run, int(pool["process"][i])), float(pool["t_s"][i])
        totals[pid] += int(pool["evicted"][i])
        events.append(_counter("KV blocks since the start", pid, t_s, {"evicted": totals[pid]}))
    return events


def _memory_counters(run: Run) -> list[Event]:
    memory = run.table("memory")
    return [
        _counter(
            "RSS (MiB)",
            _pid(run, int(memory["process"][i])),
            float(memory["t_s"][i]),
            {"MiB": round(float(memory["rss_bytes"][i]) / 2**20, 2)},
        )
        for i in range(len(memory["t_s"]))
    ]


def _requests(run: Run) -> list[Event]:
    """Return one async span per request; a request that never ended has no end event."""
    requests = run.table("requests")
    pid = next((p.pid for p in run.header.processes if p.role == "front_end"), UNKNOWN_PID)
    events: list[Event] = []
    for i in range(len(requests["id"])):
        sent, first, end = (float(requests[c][i]) for c in ("sent_s", "first_token_s", "finished_s"))
        if math.isnan(sent):
            continue
        facts = {
            "id": str(requests["id"][i]),
            "prompt_tokens": int(requests["prompt_tokens"][i]),
            "hit_tokens": int(requests["hit_tokens"][i]),
            "output_tokens": int(requests["output_tokens"][i]),
        }
        common: Event = {"cat": "request", "id": i, "pid": pid, "tid": 0}
        events.append({**common, "ph": "b", "name": "request", "ts": round(sent * 1e6, 3), "args": facts})
        if not math.isnan(first):
            wait = {**common, "name": "until first token"}
            events.append({**wait, "ph": "b", "ts": round(sent * 1e6, 3)})
            events.append({**wait, "ph": "e", "ts": round(first * 1e6, 3)})
        if not math.isnan(end):
            events.append({**common, "ph": "e", "name": "request", "ts": round(end * 1e6, 3)})
    return events


PHASES = ("schedule", "execute", "update")
FACTS = (
    "scheduled_tokens",
    "prefill_tokens",
    "requests",
    "running",
    "waiting",
    "free_blocks",
    "context_tokens",
)


def _steps(run: Run, process: int) -> Iterator[Event]:
    """Yield the steps of one process in order of time, each followed by its phases.

    With a batch queue, schedule and update of a step belong to different batches. The order and durations of the
    phases are exact; the time between them is not recorded.
    """
    steps, place = run.table("steps"), {"cat": "step", "pid": _pid(run, process), "tid": STEPS}
    for i in _rows(steps, process):
        start = float(steps["t_s"][i]) * 1e6
        end = start + float(steps["step_us"][i])
        yield _span(place, "step", start, end, {name: int(steps[name][i]) for name in FACTS})
        begin = start
        for phase in PHASES:
            until = min(end, begin + float(steps[f"{phase}_us"][i]))
            if until > begin:
                yield _span(place, phase, begin, until)
            begin = until


def _collections(run: Run, process: int) -> Iterator[Event]:
    """Yield the garbage collections of one process in order of time. The column `t_s` is their start."""
    gc, place = run.table("gc"), {"cat": "gc", "pid": _pid(run, process), "tid": COLLECTIONS}
    for i in _rows(gc, process):
        start = float(gc["t_s"][i]) * 1e6
        facts = {"collected": int(gc["collected"][i]), "uncollectable": int(gc["uncollectable"][i])}
        name = f"gc generation {gc['generation'][i]}"
        yield _span(place, name, start, start + float(gc["pause_us"][i]), facts)


def _rows(table: Table, process: int) -> list[int]:
    """Return the rows of one process in order of time."""
    rows = (table["process"] == process).nonzero()[0].tolist()
    return sorted(rows, key=lambda row: float(table["t_s"][row]))


def process_numbers(run: Run) -> list[int]:
    """Return the numbers of all processes in the run's header or in its tables."""
    numbers = set(range(len(run.header.processes)))
    for name in ("steps", "gc", "memory"):
        numbers.update(int(p) for p in set(run.table(name)["process"].tolist()))
    return sorted(numbers)
