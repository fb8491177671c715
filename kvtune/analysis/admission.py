"""Requests that overtook others where the core admits by cached prefix: Run -> Admission. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kvtune.run.types import Run


@dataclass(frozen=True, slots=True)
class Admission:
    """Requests that came to the queue in turn. `overtaken`: admitted, or given up, after one that came later.

    `longest_wait_s`: the longest time from the first admission that passed a request until the last one's turn was
    over, at most the bound and one admission. `by_age`: admissions that
    `admission_age_s` decided against a request with more in the cache. `in_force` False: stock's order; see the notes.
    """

    in_force: bool
    age_s: float
    admitted: int
    ahead: int
    overtaken: int
    by_age: int
    longest_wait_s: float


def admission(run: Run) -> Admission | None:
    """None where the core did not admit by cached prefix."""
    core = run.header.core
    if "admission" not in core.parts:
        return None
    counted = {name: core.counters.get(f"admission_{name}", 0) for name in COUNTED}
    return Admission(
        in_force=core.parts["admission"],
        age_s=float(core.settings.get("admission_age_s", 0.0)),
        admitted=counted["admitted"],
        ahead=counted["ahead"],
        overtaken=counted["overtaken"],
        by_age=counted["by_age"],
        longest_wait_s=counted["longest_wait_us"] / 1e6,
    )


COUNTED = ("admitted", "ahead", "overtaken", "by_age", "longest_wait_us")
