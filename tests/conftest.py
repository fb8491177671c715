"""What every test is held to: no hook of ours outlives the test that installed it, no example has a deadline."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from hypothesis import settings

# A busy machine is no defect: no test asserts a time.
settings.register_profile("kvtune", deadline=None)
settings.load_profile("kvtune")


@pytest.fixture(autouse=True)
def no_hook_leaks() -> Iterator[None]:
    yield
    left = [c for c in gc.callbacks if (getattr(c, "__module__", "") or "").startswith("kvtune")]
    assert not left, f"collector callbacks outlived their test: {left}"
