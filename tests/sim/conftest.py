"""One simulator process for all simulator tests of a pytest worker: it imports vLLM once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvtune.sim.simulators import Simulators


@pytest.fixture(scope="session")
def simulators() -> Iterator[Simulators]:
    pytest.importorskip("vllm", reason="needs vLLM")
    with Simulators() as started:
        yield started
