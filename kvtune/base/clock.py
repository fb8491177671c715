"""What a command waits by. A lab has one, and tests hand over another, which need not wait."""

from __future__ import annotations

import time


class Clock:
    """This machine's."""

    def now(self) -> float:
        """Return seconds since some moment."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
