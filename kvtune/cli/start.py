"""The first of kvtune that runs, and its signals. Imports nothing of ours at the top, so that it is ready at once.

Ctrl-C, SIGTERM and a closed terminal (SIGHUP) end every command alike: what it holds is removed, its processes end, it
says one line and exits with 130. Before the command begins, and after it, nothing is held: the process ends at once.
A signal that the caller ignores (nohup, a job of a script) stays ignored.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
EXIT = 130


def main() -> None:
    with _on_stop(_end):
        from kvtune.cli.app import main as app

        app()


@contextmanager
def interruptible() -> Iterator[None]:
    """Each signal that stops raises KeyboardInterrupt, with the signal's name unless it was Ctrl-C."""
    with _on_stop(_interrupt):
        yield


@contextmanager
def _on_stop(act: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # there are no signals
        yield
        return
    before = {n: signal.getsignal(n) for n in STOPS}
    try:
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, act)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(*(() if number == signal.SIGINT else (signal.Signals(number).name,)))


def _end(number: int, frame: FrameType | None) -> None:
    try:
        os.write(2, b"kvtune: interrupted\n")
    finally:
        os._exit(EXIT)
