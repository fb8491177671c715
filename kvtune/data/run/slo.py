"""The limits of a request's times, as `--slo ttft=500,tpot=50` gives them, in milliseconds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtune.base.errors import UsageError

if TYPE_CHECKING:
    from kvtune.data.run.extras import SloName

LIMITS: dict[SloName, str] = {
    "ttft": "time to the first token",
    "tpot": "mean time per token after the first",
    "e2e": "time to the last token",
}


def read_slo(text: str) -> dict[str, float]:
    """Return the limits by name; none for an empty text. UsageError lists the names."""
    limits: dict[str, float] = {}
    for part in (p.strip() for p in text.split(",") if p.strip()):
        name, _, number = part.partition("=")
        try:
            value = float(number.removesuffix("ms"))
        except ValueError:
            value = 0.0
        if name.strip() not in LIMITS or not 0 < value < float("inf"):
            names = ", ".join(f"{n} ({what})" for n, what in LIMITS.items())
            raise UsageError(
                f"--slo {part} is not a limit", f"give NAME=MILLISECONDS, with NAME one of {names}"
            )
        limits[name.strip()] = value
    return limits
