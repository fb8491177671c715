"""What a setting may be, and settings that go together. Types only."""

from __future__ import annotations

Value = bool | int | float | str
Settings = dict[str, Value]
Bundle = tuple[tuple[str, Value], ...]
"""Settings that go together: one value of a knob of the search that stands for several (a layout of blocks)."""
