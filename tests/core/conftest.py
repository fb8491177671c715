"""Every test of the core starts and ends with a clean core state."""

from __future__ import annotations

from typing import Any

import pytest

from kvtune.core import state


@pytest.fixture(autouse=True)
def fresh_state() -> Any:
    state.clear()
    yield
    state.clear()
