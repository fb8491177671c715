"""Every test of the core begins and ends in a process where nothing was asked for."""

from __future__ import annotations

from typing import Any

import pytest

from kvtune.core import state


@pytest.fixture(autouse=True)
def fresh_state() -> Any:
    state.clear()
    yield
    state.clear()
