"""The core's state in this process: which parts are on, why others are off, counters. The probe copies it to run files.

Contract: `state()` returns plain data and never fails; this module only records. The core's parts report with
`activate`, `refuse`, `part`, `note`, `count` and `gauge`. Policies read the time from `clock`. A process has one
EngineCore and one `Books`; the simulator, which may have several, gives each its own, with its virtual clock, and calls
`use` before each of its steps. No vLLM imports.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypedDict

from kvtune.base.legal import Value
from kvtune.data.knobs import CoreSettings
from kvtune.plugin.vllm.plugin_state import STATE

MAX_NOTES = 100


class CoreState(TypedDict):
    """The state as plain data. `parts`: whether each switch is in force. `why`: why the core is off, or empty."""

    active: bool
    why: str
    settings: dict[str, Value]
    parts: dict[str, bool]
    counters: dict[str, int]
    notes: list[str]


class Books:
    """What one EngineCore's core has recorded, and the clock that its policies read."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.active = False
        self.why = "not asked for"
        self.settings: CoreSettings | None = None
        self.parts: dict[str, bool] = {}
        self.notes: list[str] = []
        self.counts: dict[str, int] = {}
        self.gauges: list[Callable[[], dict[str, int]]] = []

    def branch(self, clock: Callable[[], float]) -> Books:
        """Return books for another EngineCore of this process: the parts that are installed, nothing counted yet."""
        books = Books(clock)
        books.active, books.why, books.settings = self.active, self.why, self.settings
        books.parts, books.notes = dict(self.parts), list(self.notes)
        return books

    def note(self, text: str) -> None:
        if text not in self.notes and len(self.notes) < MAX_NOTES:
            self.notes.append(text)

    def counters(self) -> dict[str, int]:
        values = dict(self.counts)
        for gauge in self.gauges:
            try:
                for name, value in gauge().items():
                    values[name] = values.get(name, 0) + value
            except Exception as error:
                self.note(f"a counter could not be read: {error!r}")
        return values

    def state(self) -> CoreState:
        return {
            "active": self.active,
            "why": self.why,
            "settings": self.settings.to_dict() if self.settings is not None else {},
            "parts": dict(self.parts),
            "counters": self.counters(),
            "notes": list(self.notes),
        }


def books() -> Books:
    """Return the books in use."""
    books: Books = STATE.books or Books()
    STATE.books = books
    return books


def clock() -> float:
    """Return seconds, by the clock of the books in use."""
    return books().clock()


def use(chosen: Books) -> None:
    """Record in these books from now on, and let policies read their clock."""
    STATE.books = chosen


@contextmanager
def using(chosen: Books) -> Iterator[None]:
    """Use these books within this context."""
    before = books()
    use(chosen)
    try:
        yield
    finally:
        use(before)


def state() -> CoreState:
    """Return a copy of the state as plain data."""
    return books().state()


def merged(states: Sequence[CoreState]) -> CoreState | None:
    """Merge the EngineCores' states: a switch is in force if it is in each, counters are summed. None for no states."""
    if not states:
        return None
    counters: dict[str, int] = {}
    for each in states:
        for name, value in each["counters"].items():
            counters[name] = counters.get(name, 0) + value
    return {
        "active": all(each["active"] for each in states),
        "why": next((each["why"] for each in states if not each["active"]), states[0]["why"]),
        "settings": states[0]["settings"],
        "parts": {
            name: all(each["parts"].get(name, False) for each in states)
            for each in states
            for name in each["parts"]
        },
        "counters": counters,
        "notes": list(dict.fromkeys(note for each in states for note in each["notes"])),
    }


def active() -> bool:
    return books().active


def counters() -> dict[str, int]:
    """Return a copy of the counters, with the gauges' values."""
    return books().counters()


def activate(settings: CoreSettings) -> None:
    mine = books()
    mine.active, mine.why, mine.settings = True, "", settings


def refuse(why: str, settings: CoreSettings | None = None) -> None:
    """Record that vLLM runs without the core, and why (one line)."""
    mine = books()
    mine.active, mine.why, mine.settings = False, why, settings
    mine.parts.clear()


def part(name: str, in_force: bool, why: str = "") -> None:
    """Record whether a switch is in force, and why not."""
    books().parts[name] = in_force
    if why:
        note(f"{name}: {why}")


def note(text: str) -> None:
    """Add a line to the run file's notes; equal lines are kept once, and at most MAX_NOTES lines."""
    books().note(text)


def count(name: str, number: int = 1) -> None:
    counts = books().counts
    counts[name] = counts.get(name, 0) + number


def gauge(read: Callable[[], dict[str, int]]) -> None:
    """Register a function that returns more counters (e.g. a pool's); it is called each time the counters are read."""
    books().gauges.append(read)
