"""The result of one check of `kvtune doctor`. Plain data."""

from __future__ import annotations

from typing import Literal

import msgspec

Level = Literal["ok", "note", "warning", "error"]
LEVELS: tuple[Level, ...] = ("ok", "note", "warning", "error")


class Finding(msgspec.Struct, frozen=True):
    """One line of the diagnosis; `hint` says what to do about it ("" when nothing needs doing)."""

    level: Level
    topic: str
    text: str
    hint: str = ""
