"""Latency limits (SLO) in milliseconds, such as `ttft=500,tpot=50,e2e=8000`. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from kvtune.errors import UsageError
from kvtune.run.extras import SloName
from kvtune.run.types import Run

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
            known = ", ".join(f"{n} ({what})" for n, what in LIMITS.items())
            raise UsageError(
                f"--slo {part} is not a limit", f"give NAME=MILLISECONDS, with NAME one of {known}"
            )
        limits[name.strip()] = value
    return limits


def with_slo(run: Run, slo: Mapping[str, float]) -> Run:
    """Return the run with the limits that define its goodput."""
    return run.with_extra(slo=dict(slo))
