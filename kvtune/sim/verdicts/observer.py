"""The replay's observer behind `SimSettings.verdicts`: a LookupListener on the scheduler, its verdicts into the run."""

from __future__ import annotations

from typing import Any

import msgspec

from kvtune.run.types import Run
from kvtune.sim.verdicts.listener import LookupListener, PromptVerdict
from kvtune.workload.types import Span, Workload


class Watch:
    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self.listener: LookupListener | None = None

    def started(self, engine: Any) -> None:
        from kvtune.workload.answers import with_answers

        spans: list[tuple[Span, ...]] = [request.prompt for request in with_answers(self._workload.requests)]
        clock = engine.model_executor.machine.clock
        self.listener = LookupListener(lambda name: spans[int(name)], clock)
        self.listener.attach(engine.scheduler)

    def sent(self, index: int, request: Any) -> None: ...

    def stepped(self, engine: Any, outputs: Any) -> None: ...

    def finished(self, index: int) -> None: ...

    def verdicts(self) -> list[PromptVerdict | None]:
        """By place in the workload; None for a request that was never looked up."""
        found = self.listener.verdicts if self.listener is not None else {}
        return [found.get(str(index)) for index in range(len(self._workload.requests))]

    def tell(self, run: Run) -> Run:
        return run.with_extra(verdicts=msgspec.to_builtins(self.verdicts()))


def verdicts_of(run: Run) -> list[PromptVerdict | None]:
    """What `Watch.tell` stored."""
    return msgspec.convert(run.header.extra.verdicts, list[PromptVerdict | None])
