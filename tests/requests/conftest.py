"""One process that renders, for all tests of the package."""

from __future__ import annotations

import pytest

from tests.tokenizers import OneChild


@pytest.fixture(scope="session")
def child() -> OneChild:
    return OneChild()
