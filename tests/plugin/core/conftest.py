"""Every test of the core starts and ends with a clean core state."""

from __future__ import annotations

from typing import Any

import pytest

from kvtune.plugin.vllm.plugin_state import STATE


@pytest.fixture(autouse=True)
def fresh_state() -> Any:
    STATE.reset()
    yield
    STATE.reset()
