"""One process that renders, and the recorded sessions of agents, for all tests of the package."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recorded_sessions import unpacked
from tests.tokenizers import OneChild


@pytest.fixture(scope="session")
def child() -> OneChild:
    return OneChild()


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked(tmp_path_factory.mktemp("sessions"))
