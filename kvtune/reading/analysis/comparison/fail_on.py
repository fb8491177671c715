"""`--fail-on`: conditions on two summaries, such as `ttft_ms.mean > +5%`. Pure.

A number with a sign or % is a change from the first run to the second (`+5%`, `-3%`, `+200`); without a sign or %, it
is the second run's value (`prefix_cache.hit_rate < 0.5`). `and` binds tighter than `or`.
"""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import copysign, inf

from kvtune.base.errors import EXIT_UNKNOWN, KvtuneError, UsageError
from kvtune.reading.analysis.comparison.compare import value_at
from kvtune.reading.analysis.comparison.measures import is_timed

_OPERATORS = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}
_CONDITION = re.compile(r"([\w.\[\]-]+)\s*(>=|<=|==|!=|>|<)\s*([+-]?)\s*(\d+(?:\.\d*)?|\.\d+)\s*(%?)")
_EXAMPLE = "write e.g. 'ttft_ms.mean > +5%', joined by `and` or `or`"


@dataclass(frozen=True, slots=True)
class Condition:
    """`change`: compare the difference between the runs, in percent of the first run's value if `percent`."""

    text: str
    path: str
    symbol: str
    number: float
    change: bool
    percent: bool


@dataclass(frozen=True, slots=True)
class FailOnOutcome:
    """Whether the expression holds, and a line with the values for each condition that makes it hold."""

    holds: bool
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FailOn:
    """A parsed expression: alternatives (`or`), each a list of conditions that must all hold (`and`)."""

    text: str
    anyof: tuple[tuple[Condition, ...], ...]

    @property
    def timed(self) -> tuple[str, ...]:
        """The conditions on times."""
        return tuple(c.text for allof in self.anyof for c in allof if is_timed(c.path))

    @property
    def paths(self) -> tuple[str, ...]:
        """The figures that the conditions name."""
        return tuple(c.path for allof in self.anyof for c in allof)

    def evaluate(self, a: Mapping[str, object], b: Mapping[str, object]) -> FailOnOutcome:
        """Evaluate the expression on the summaries of two runs. KvtuneError if a run has no value for a field."""
        return self._outcome(lambda condition: _check(condition, a, b))

    def on_values(self, values: Mapping[str, float], shares: Mapping[str, float]) -> FailOnOutcome:
        """Evaluate the expression on one result: compare plain numbers with `values`, percentages with `shares`."""
        return self._outcome(lambda condition: _check_one(condition, values, shares))

    def _outcome(self, check: Callable[[Condition], str]) -> FailOnOutcome:
        results = [[check(condition) for condition in allof] for allof in self.anyof]
        reasons = tuple(reason for row in results if all(row) for reason in row)
        return FailOnOutcome(any(all(row) for row in results), reasons)


def parse_fail_on(text: str) -> FailOn:
    """Parse an expression. UsageError names the part that is not a condition. `evaluate` checks the paths."""
    anyof = tuple(
        tuple(_condition(part, text) for part in re.split(r"\s+and\s+", allof))
        for allof in re.split(r"\s+or\s+", text.strip())
    )
    return FailOn(text, anyof)


def _condition(part: str, text: str) -> Condition:
    match = _CONDITION.fullmatch(part.strip())
    if match is None:
        raise UsageError(f"--fail-on {text!r}: {part.strip()!r} is not a condition", _EXAMPLE)
    path, symbol, sign, digits, percent = match.groups()
    number = float(f"{sign}{digits}")
    path = re.sub(r"\[(\d+)\]", r".\1", path)
    return Condition(part.strip(), path, symbol, number, bool(sign or percent), bool(percent))


def _check(condition: Condition, a: Mapping[str, object], b: Mapping[str, object]) -> str:
    """Return a line with the values if the condition holds, else ""."""
    after = _value(condition, b, "second")
    if not condition.change:
        holds = _OPERATORS[condition.symbol](after, condition.number)
        return f"{condition.text}: it is {after:.6g}" if holds else ""
    before = _value(condition, a, "first")
    change = after - before
    if condition.percent and change:
        change = 100 * change / abs(before) if before else copysign(inf, change)
    if not _OPERATORS[condition.symbol](change, condition.number):
        return ""
    unit = " %" if condition.percent else ""
    return f"{condition.text}: {before:.6g} -> {after:.6g} is {change:+.4g}{unit}"


def _check_one(condition: Condition, values: Mapping[str, float], shares: Mapping[str, float]) -> str:
    figures = shares if condition.percent else values
    if condition.path not in figures:
        raise UsageError(f"--fail-on: there is no {condition.path!r}", f"give one of {', '.join(figures)}")
    value = figures[condition.path]
    unit = " %" if condition.percent else ""
    holds = _OPERATORS[condition.symbol](value, condition.number)
    return f"{condition.text}: it is {value:.4g}{unit}" if holds else ""


def _value(condition: Condition, fields: Mapping[str, object], which: str) -> float:
    try:
        value = value_at(fields, condition.path)
    except KeyError:
        paths = sorted(_paths(fields))
        near = difflib.get_close_matches(condition.path, paths, n=3) or paths[:5]
        raise UsageError(
            f"--fail-on: runs have no field {condition.path!r}",
            f"give a field of `--json`, for example {', '.join(near)}",
        ) from None
    if value is None:
        raise KvtuneError(
            f"--fail-on {condition.text!r}: the {which} run has no value for {condition.path}",
            "choose a field that both runs measured, or record them again",
            EXIT_UNKNOWN,
        )
    return value


def _paths(value: object, before: str = "") -> Iterator[str]:
    """Yield all paths that lead to a number."""
    pairs: Iterable[tuple[object, object]]
    if isinstance(value, Mapping):
        pairs = value.items()
    elif isinstance(value, list):
        pairs = enumerate(value)
    else:
        if isinstance(value, (int, float)):
            yield before
        return
    for name, inner in pairs:
        yield from _paths(inner, f"{before}.{name}" if before else str(name))
