"""Labs that tests hand over: no engine starts, and a function answers in its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtune.lab.engine.profile import EngineBench, Profiled
from kvtune.lab.lab import Lab
from kvtune.lab.setup.setup import Setup

Answer = Callable[[Setup, Path], Profiled]


@dataclass(frozen=True, slots=True)
class Answering(EngineBench):
    """`answer` gets the set-up and the folder of run files."""

    answer: Answer = field(kw_only=True)

    def run(self, setup: Setup, watch: Any = None) -> Profiled:
        return self.answer(setup, self.output)


class FakeLab(Lab):
    """`environments`: of each bench that it made, for the engine's processes."""

    def __init__(self, answer: Answer) -> None:
        self.answer, self.environments = answer, list[Mapping[str, str]]()

    def engine(
        self,
        output: Path,
        *,
        probe: str = "light",
        stacks: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> EngineBench:
        self.environments.append(environment or {})
        return Answering(output, answer=self.answer)
