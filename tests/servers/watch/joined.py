"""The join of one server's log with what it published."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvtune.requests.log.logged import Logged
from kvtune.servers.watch.cache import Cache
from kvtune.servers.watch.events import Received
from kvtune.servers.watch.requests import Answered, Served, join_fleet


def join(
    received: Iterable[Received], asked: Iterable[Logged], cache: Cache | None, **more: Any
) -> list[Answered]:
    """Return the requests in the order in which they ended. `more`: other fields of `Served`."""
    return join_fleet([Served(received, asked, cache, **more)])[0]
