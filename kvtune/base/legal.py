"""A setting's legal values: type, range or choices. Used for the core's knobs and vLLM's settings in files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, SupportsFloat

Value = bool | int | float | str
Kind = Literal["switch", "integer", "number", "choice"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Legal:
    """A setting's legal values: a number from `low` to `high`, one of `choices`, or either (`auto` or a number)."""

    kind: Kind
    choices: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0
    unit: str = ""

    @property
    def legal(self) -> str:
        """The legal values in words: `a whole number from 1 to 1024 (tokens)`."""
        if self.kind == "switch":
            return "true, false"
        if self.kind == "choice":
            return ", ".join(self.choices)
        whole = "a whole number" if self.kind == "integer" else "a number"
        unit = f" ({self.unit})" if self.unit else ""
        words = f", or {' or '.join(self.choices)}" if self.choices else ""
        return f"{whole} from {self.low:.12g} to {self.high:.12g}{unit}{words}"

    def read(self, value: object) -> Value | None:
        """Convert a value, or a value as text, to this type; None if it is not legal."""
        text = value.strip().lower() if isinstance(value, str) else value
        if self.kind == "switch":
            return {"true": True, "false": False, "on": True, "off": False, "1": True, "0": False}.get(
                str(text).lower()
            )
        if word := next((word for word in self.choices if word.lower() == text), None):
            return word
        if self.kind == "choice" or not isinstance(text, str | SupportsFloat) or isinstance(text, bool):
            return None
        try:
            number = float(text)
        except (OverflowError, ValueError):
            return None
        whole = self.kind == "number" or number == number // 1
        if not (whole and self.low <= number <= self.high):
            return None
        return int(text if isinstance(text, int) else number) if self.kind == "integer" else number

    def is_legal(self, value: object) -> bool:
        """Whether the value is legal without conversion: the number 32 can be, the text "32" is not."""
        if isinstance(value, str):
            return value in self.choices
        if self.kind == "switch" or isinstance(value, bool):
            return self.kind == "switch" and isinstance(value, bool)
        if self.kind == "integer" and not isinstance(value, int):
            return False
        return self.kind != "choice" and self.read(value) is not None
