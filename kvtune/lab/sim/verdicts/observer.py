"""Observes a replay with `Simulated(verdicts=True)`: adds the verdicts of a LookupListener to the run."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvtune.data.run.types import Run
from kvtune.lab.sim.engine_types import EngineCore
from kvtune.lab.sim.verdicts.listener import LookupListener, PromptVerdict
from kvtune.plugin.vllm.types import Outputs, Request
from kvtune.requests.types import Span, Workload


class VerdictObserver:
    """Attaches a listener when the replay starts, and adds the listener's verdicts to the finished run."""

    needs_single_steps = False  # the listener also notices evictions within many steps taken at once

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.listener: LookupListener | None = None

    def started(self, engine: EngineCore) -> None:
        from kvtune.requests.loads.tokens import with_answers

        spans: list[tuple[Span, ...]] = [request.prompt for request in with_answers(self.workload.requests)]
        clock = engine.model_executor.machine.clock
        self.listener = LookupListener(lambda request_id: spans[int(request_id)], clock)
        self.listener.attach(engine.scheduler)

    def sent(self, index: int, request: Request) -> None: ...

    def stepped(self, engine: EngineCore, outputs: Outputs | None) -> None: ...

    def finished(self, index: int) -> None: ...

    def verdicts(self) -> list[PromptVerdict | None]:
        """Return one verdict per request, in the workload's order; None for a request that was never looked up."""
        by_id = self.listener.verdicts if self.listener is not None else {}
        return [by_id.get(str(index)) for index in range(len(self.workload.requests))]


def with_verdicts(run: Run, observers: Sequence[VerdictObserver]) -> Run:
    """Return the run with each request's verdict, from the observer of the engine that served it."""
    by_engine = [observer.verdicts() for observer in observers]
    merged = [
        next((verdict for verdict in verdicts if verdict is not None), None)
        for verdicts in zip(*by_engine, strict=True)
    ]
    return run.with_extra(verdicts=msgspec.to_builtins(merged))


def verdicts_of(run: Run) -> list[PromptVerdict | None]:
    """Read the verdicts that `with_verdicts` stored."""
    return msgspec.convert(run.header.extra.verdicts, list[PromptVerdict | None])
