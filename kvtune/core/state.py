"""What the core is doing in this process: a record that the probe copies into the run file. No vLLM imports.

Contract: `state()` returns plain data and never fails. The core's parts write with `activate`, `refuse`,
`part`, `note`, `count` and `gauge`; nothing here decides anything. `clock` is the time that policies age blocks
by: a simulator sets its virtual clock here (`state.clock = f`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from kvtune.core.settings import CoreSettings

clock: Callable[[], float] = time.monotonic
"""Seconds. Read as `state.clock()` at each use, so that it can be replaced while an engine lives."""

MAX_NOTES = 100

_active = False
_why = "not asked for"
_settings: CoreSettings | None = None
_parts: dict[str, bool] = {}
_notes: list[str] = []
_counters: dict[str, int] = {}
_gauges: list[Callable[[], dict[str, int]]] = []


def state() -> dict[str, Any]:
    """`active, why, settings, parts {switch: in force}, notes, counters`: plain data, a copy."""
    return {
        "active": _active,
        "why": _why,
        "settings": _settings.to_dict() if _settings is not None else {},
        "parts": dict(_parts),
        "counters": counters(),
        "notes": list(_notes),
    }


def active() -> bool:
    return _active


def counters() -> dict[str, int]:
    """What was counted, gauges included: a copy."""
    found = dict(_counters)
    for gauge in _gauges:
        try:
            for name, value in gauge().items():
                found[name] = found.get(name, 0) + value
        except Exception as error:
            note(f"a counter could not be read: {error!r}")
    return found


def activate(settings: CoreSettings) -> None:
    global _active, _why, _settings
    _active, _why, _settings = True, "", settings


def refuse(why: str, settings: CoreSettings | None = None) -> None:
    """The core does not run; `why` names the reason in one line."""
    global _active, _why, _settings
    _active, _why, _settings = False, why, settings
    _parts.clear()


def part(name: str, in_force: bool, why: str = "") -> None:
    """One of the switches is in force, or stepped aside and why."""
    _parts[name] = in_force
    if why:
        note(f"{name}: {why}")


def note(text: str) -> None:
    """A line that a reader of the run must know; repeated lines are kept once."""
    if text not in _notes and len(_notes) < MAX_NOTES:
        _notes.append(text)


def count(name: str, by: int = 1) -> None:
    _counters[name] = _counters.get(name, 0) + by


def gauge(read: Callable[[], dict[str, int]]) -> None:
    """Counters that live elsewhere (a pool's): read when the state is asked for."""
    _gauges.append(read)


def counters_reset() -> None:
    """Forget counts, for instance when the measuring phase begins; gauges keep their own."""
    _counters.clear()


def clear() -> None:
    """Back to a process where nothing was asked for (tests)."""
    global _active, _why, _settings, clock
    _active, _why, _settings, clock = False, "not asked for", None, time.monotonic
    for store in (_parts, _counters):
        store.clear()
    _notes.clear()
    _gauges.clear()
