"""The core's state in this process: what is active, why not, counters. The probe copies it into the run file.

Contract: `state()` returns plain data and never fails; nothing here decides anything. The core's parts report with
`activate`, `refuse`, `part`, `note`, `count` and `gauge`. Policies age blocks by `clock`; a simulator
replaces it by its virtual clock (`state.clock = f`), and sets `workers` to False. No vLLM imports.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypedDict

from kvtune.core.settings import CoreSettings
from kvtune.legal import Value

clock: Callable[[], float] = time.monotonic
"""Seconds. Read as `state.clock()` at each use, so that it can be replaced while an engine lives."""

workers = True
"""Whether this process may have one of vLLM's workers. If False, a worker's modules are not imported to be
patched: importing them takes as long as replaying some dozen requests.
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
    """`parts`: whether each switch is in force."""

    active: bool
    why: str
    settings: dict[str, Value]
    parts: dict[str, bool]
    counters: dict[str, int]
    notes: list[str]


def state() -> CoreState:
    """A copy as plain data."""
    return {
        "active": _active,
        "why": _why,
        "settings": _settings.to_dict() if _settings is not None else {},
        "parts": dict(_parts),
        "counters": counters(),
        "notes": list(_notes),
    }


def merged(states: Sequence[CoreState]) -> CoreState | None:
    """One report of all EngineCores: a part is in force if it is in each; counters are added up."""
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
    """A copy of the counters, with the gauges' values."""
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
    """Record that stock vLLM runs, and why, in one line."""
    global _active, _why, _settings
    _active, _why, _settings = False, why, settings
    _parts.clear()


def part(name: str, in_force: bool, why: str = "") -> None:
    """Record whether a switch is in force, and why not."""
    _parts[name] = in_force
    if why:
        note(f"{name}: {why}")


def note(text: str) -> None:
    """Add a line for the reader of the run file; equal lines are kept once."""
    if text not in _notes and len(_notes) < MAX_NOTES:
        _notes.append(text)


def count(name: str, by: int = 1) -> None:
    _counters[name] = _counters.get(name, 0) + by


def gauge(read: Callable[[], dict[str, int]]) -> None:
    """Add counters that live elsewhere (in a pool); they are read with the state."""
    _gauges.append(read)


def clear() -> None:
    """Forget everything (tests)."""
    global _active, _why, _settings, clock
    _active, _why, _settings, clock = False, "not asked for", None, time.monotonic
    for store in (_parts, _counters):
        store.clear()
    _notes.clear()
    _gauges.clear()
