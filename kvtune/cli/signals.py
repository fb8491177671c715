"""How signals end a command. Imports no other module of kvtune, so that it is ready at once.

Ctrl-C, SIGTERM and a closed terminal (SIGHUP) end every command in the same way: it removes its temporary files, ends
its processes, prints one line and exits with 130. Before and after the command, the process ends at once.
A signal that the caller ignores (nohup, a job of a script) stays ignored, except SIGINT in `noted`: what runs until it
is stopped has to end from a script, too, as `tap` does.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
EXIT = 130

Handler = Callable[[int, FrameType | None], object]


def end_at_once() -> None:
    """Make each of the signals print one line and end the process at once, while nothing has to be cleaned up."""
    _act(_end)


def interruptible() -> AbstractContextManager[None]:
    """Make the signals raise KeyboardInterrupt in the `with` block, with the signal's name unless it was Ctrl-C."""
    return _acting(_interrupt)


@contextmanager
def noted() -> Iterator[list[str]]:
    """Note the signals in the `with` block instead of ending it, for work that must not be lost. Yield their names."""
    names: list[str] = []
    with _acting(lambda number, _: names.append(signal.Signals(number).name), always=signal.SIGINT):
        yield names


@contextmanager
def _acting(act: Handler, always: signal.Signals | None = None) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # only the main thread can handle signals
        yield
        return
    before = _act(act, always)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _act(act: Handler, always: signal.Signals | None = None) -> dict[signal.Signals, Handler | int | None]:
    """Set a handler for the signals that are not ignored, and for `always`; return the previous handlers."""
    before = {number: signal.getsignal(number) for number in STOPS}
    heard = {n: handler for n, handler in before.items() if handler is not signal.SIG_IGN or n == always}
    for number in heard:
        signal.signal(number, act)
    return heard


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(*(() if number == signal.SIGINT else (signal.Signals(number).name,)))


def _end(number: int, frame: FrameType | None) -> None:
    try:
        os.write(2, b"kvtune: interrupted\n")
    finally:
        os._exit(EXIT)
