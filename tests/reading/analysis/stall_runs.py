"""A toy engine with planted stalls: four requests that decode side by side, 10 ms a step, and what holds them up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvtune.data.run.extras import CollectorCounts, Extras
from kvtune.data.run.types import ProcessInfo, Run, Table
from tests.reading.analysis.made import header_of, table

PROCESSES = [
    ProcessInfo(pid=1, role="front_end"),
    ProcessInfo(pid=2, role="engine_core"),
    ProcessInfo(pid=3, role="worker"),
]
FRONT_END, ENGINE_CORE, WORKER = 0, 1, 2
STEP_S, BETWEEN_S, WAY_S, REST_S = 0.010, 0.001, 0.0005, 0.0002
REQUESTS = 4


@dataclass
class Toy:
    """Extra seconds by step: in the step, before it, on the way to the front end, from there to the client."""

    steps: int = 100
    in_step: Mapping[int, float] = field(default_factory=dict)
    before: Mapping[int, float] = field(default_factory=dict)
    way: Mapping[int, float] = field(default_factory=dict)
    rest: Mapping[int, float] = field(default_factory=dict)
    prefill: Mapping[int, int] = field(default_factory=dict)
    """Prompt tokens of one more request in a step; each takes 50 microseconds, and its request gets no token."""
    without: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Requests that were preempted and miss a step, by step."""
    gc: Sequence[tuple[Any, ...]] = ()
    """process, start, pause in seconds, CPU seconds, generation, line"""
    waits: Mapping[int, Sequence[tuple[float, float]]] = field(default_factory=dict)
    """By process: (second, wait so far) at each sample."""
    spins: bool = False
    """EngineCore's thread is on a CPU all of a step, except for what the step takes longer."""
    requests_from: Mapping[int, int] = field(default_factory=dict)
    """Requests more than the four in the work of the steps from one on; each takes half a millisecond."""
    stopped: Sequence[tuple[int, float]] = ()
    """(process, second) of samples in which it was stopped."""
    lines: Sequence[str] = ()
    receipts: bool = True
    stamps: bool = True
    """Whether EngineCore's own time of each token is recorded."""

    def times(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Begin and end of each step."""
        begin, end, now = np.zeros(self.steps), np.zeros(self.steps), 0.0
        for i in range(self.steps):
            begin[i] = now + BETWEEN_S + self.before.get(i, 0.0)
            work_s = STEP_S + 50e-6 * self.prefill.get(i, 0) + 500e-6 * self.more(i)
            now = end[i] = begin[i] + work_s + self.in_step.get(i, 0.0)
        return begin, end

    def more(self, step: int) -> int:
        return max((more for start, more in self.requests_from.items() if start <= step), default=0)

    def run(self) -> Run:
        begin, end = self.times()
        # The front end takes steps in order, and hands out what has piled up at once.
        taken = np.maximum.accumulate(end + WAY_S + [self.way.get(i, 0.0) for i in range(self.steps)])
        given = np.maximum.accumulate(taken + REST_S + [self.rest.get(i, 0.0) for i in range(self.steps)])
        rows: list[tuple[int, float, int, float]] = []
        for request in range(REQUESTS):
            made = [i for i in range(self.steps) if request not in self.without.get(i, ())]
            for at in sorted({given[i] for i in made}):
                together = [i for i in made if given[i] == at]
                stamp = end[together[-1]] - 1e-5 if self.stamps else np.nan
                rows.append((request, at, len(together), stamp))
        absent = [len(self.without.get(i, ())) for i in range(self.steps)]
        prompts = [self.prefill.get(i, 0) for i in range(self.steps)]
        decodes = np.array([REQUESTS - n + self.more(i) for i, n in enumerate(absent)])
        step_s = end - begin
        cpu_s = [
            0.2 * step_s[i] if not self.spins else step_s[i] - self.in_step.get(i, 0.0)
            for i in range(self.steps)
        ]
        prompted = [i for i in range(self.steps) if prompts[i]]
        tables: dict[str, Table] = {
            "tokens": table(
                "tokens",
                request=[row[0] for row in rows], t_s=[row[1] for row in rows], count=[row[2] for row in rows],
                made_s=[row[3] for row in rows],
            ),
            "steps": table(
                "steps", process=[ENGINE_CORE] * self.steps, t_s=begin, step_us=step_s * 1e6, execute_us=step_s * 1e6,
                cpu_us=np.array(cpu_s) * 1e6, scheduled_tokens=decodes + prompts, prefill_tokens=prompts,
                requests=decodes + [1 if n else 0 for n in prompts], running=[REQUESTS] * self.steps,
                context_tokens=decodes * 100,
                preempted=[int(absent[i] > (absent[i - 1] if i else 0)) for i in range(self.steps)],
            ),
            "requests": table(
                "requests",
                id=[f"r{i}" for i in range(REQUESTS)] + [f"prompt-{i}" for i in prompted],
                sent_s=[0.0] * REQUESTS + [begin[i] - 0.002 for i in prompted],
                first_token_s=[given[0]] * REQUESTS + [given[i] for i in prompted],
                preemptions=[int(any(r in own for own in self.without.values())) for r in range(REQUESTS)]
                + [0] * len(prompted),
            ),
        }  # fmt: skip
        if self.receipts:
            tables["receipts"] = table("receipts", t_s=taken)
        if self.gc:
            process, start, pause, cpu, generation, line = zip(*self.gc, strict=True)
            tables["gc"] = table(
                "gc", process=process, t_s=start, generation=generation, line=line,
                pause_us=np.array(pause) * 1e6, cpu_us=np.array(cpu) * 1e6,
            )  # fmt: skip
        if samples := self._samples():
            process, at, wait, stopped = zip(*samples, strict=True)
            tables["memory"] = table("memory", process=process, t_s=at, wait_s=wait, stopped=stopped)
        ledger = {str(ENGINE_CORE): CollectorCounts(lines=list(self.lines))}
        return Run(header_of(processes=PROCESSES, extra=Extras(ledger=ledger)), tables)

    def _samples(self) -> list[tuple[int, float, float, int]]:
        found = [(p, at, wait, 0) for p, samples in self.waits.items() for at, wait in samples]
        return found + [(p, at, np.nan, 1) for p, at in self.stopped]
