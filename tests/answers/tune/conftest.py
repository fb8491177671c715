"""What tests of a study in a database share: a PostgreSQL that is up when a test begins."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.answers.tune.postgres import Cluster, require_postgres


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """One for a file: a test that stops it starts it again, and every test has its own databases or studies."""
    require_postgres()
    made = Cluster()
    try:
        made.start()
        yield made
    finally:
        made.remove()
