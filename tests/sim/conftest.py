"""What the simulator's tests share: one simulator process, which imports vLLM once for all of a worker's files."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvtune.sim.simulators import Simulators


@pytest.fixture(scope="session")
def simulators() -> Iterator[Simulators]:
    pytest.importorskip("vllm", reason="needs vLLM")
    with Simulators() as found:
        yield found
