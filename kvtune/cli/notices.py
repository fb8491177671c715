"""Standard error: `--quiet` drops progress and notes; errors and the reasons of an exit code are always printed."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import IO

_errors: ContextVar[IO[str] | None] = ContextVar("errors", default=None)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Drop what the `with` block prints on standard error, except by `always`."""
    token = _errors.set(sys.stderr)
    try:
        with Path(os.devnull).open("w") as nothing, contextlib.redirect_stderr(nothing):
            yield
    finally:
        _errors.reset(token)


def always(text: str) -> None:
    """Print a line on standard error, also with `--quiet`."""
    print(text, file=_errors.get() or sys.stderr, flush=True)
