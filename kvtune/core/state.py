"""The core's state in this process: which parts are on, why others are off, counters. The probe copies it to run files.

Contract: `state()` returns plain data and never fails; this module only records. The core's parts report with
`activate`, `refuse`, `part`, `note`, `count` and `gauge`. Policies read the time from `clock`; the simulator replaces
`clock` by its virtual clock (`state.clock = f`) and sets `workers` to False. No vLLM imports.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypedDict

from kvtune.knobs import CoreSettings
from kvtune.legal import Value

clock: Callable[[], float] = time.monotonic
"""Returns seconds. Callers write `state.clock()` and keep no copy, so that the clock can be replaced at run time."""

workers = True
"""Whether this process may run a vLLM worker. If False, worker modules are not imported for patching: the import takes
as long as simulating some dozen requests.
"""

MAX_NOTES = 100

_active = False
_why = "not asked for"
_settings: CoreSettings | None = None
_parts: dict[str, bool] = {}
_notes: list[str] = []
_counters: dict[str, int] = {}
_gauges: list[Callable[[], dict[str, int]]] = []


class CoreState(TypedDict):
    """The state as plain data. `parts`: whether each switch is in force. `why`: why the core is off, or empty."""

    active: bool
    why: str
    settings: dict[str, Value]
    parts: dict[str, bool]
    counters: dict[str, int]
    notes: list[str]


def state() -> CoreState:
    """Return a copy of the state as plain data."""
    return {
        "active": _active,
        "why": _why,
        "settings": _settings.to_dict() if _settings is not None else {},
        "parts": dict(_parts),
        "counters": counters(),
        "notes": list(_notes),
    }


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
    return _active


def counters() -> dict[str, int]:
    """Return a copy of the counters, with the gauges' values."""
    values = dict(_counters)
    for gauge in _gauges:
        try:
            for name, value in gauge().items():
                values[name] = values.get(name, 0) + value
        except Exception as error:
            note(f"a counter could not be read: {error!r}")
    return values


def activate(settings: CoreSettings) -> None:
    global _active, _why, _settings
    _active, _why, _settings = True, "", settings


def refuse(why: str, settings: CoreSettings | None = None) -> None:
    """Record that vLLM runs without the core, and why (one line)."""
    global _active, _why, _settings
    _active, _why, _settings = False, why, settings
    _parts.clear()


def part(name: str, in_force: bool, why: str = "") -> None:
    """Record whether a switch is in force, and why not."""
    _parts[name] = in_force
    if why:
        note(f"{name}: {why}")


def note(text: str) -> None:
    """Add a line to the run file's notes; equal lines are kept once, and at most MAX_NOTES lines."""
    if text not in _notes and len(_notes) < MAX_NOTES:
        _notes.append(text)


def count(name: str, by: int = 1) -> None:
    _counters[name] = _counters.get(name, 0) + by


def gauge(read: Callable[[], dict[str, int]]) -> None:
    """Register a function that returns more counters (e.g. a pool's); it is called each time the counters are read."""
    _gauges.append(read)


def clear() -> None:
    """Forget everything recorded; for tests."""
    global _active, _why, _settings, clock
    _active, _why, _settings, clock = False, "not asked for", None, time.monotonic
    for store in (_parts, _counters):
        store.clear()
    _notes.clear()
    _gauges.clear()
