"""Benches that tests hand over in place of the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtune.engine.profile import EngineBench, Profiled
from kvtune.engine.setup import Setup


@dataclass(frozen=True, slots=True)
class Answering(EngineBench):
    """No engine starts: `answer` gets the set-up and the folder of run files."""

    answer: Callable[[Setup, Path], Profiled] = field(kw_only=True)

    def run(self, setup: Setup, watch: Any = None) -> Profiled:
        return self.answer(setup, self.output)
