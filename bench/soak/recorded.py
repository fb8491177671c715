"""A trace that a soak's server recorded, beside what its clients saw. Reads a file."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

Lengths = tuple[int, int]
"""Tokens of a prompt, and of its answer."""


def read(trace: Path) -> list[Lengths]:
    """One item a recorded request; ValueError where a line is not a request."""
    lines = trace.read_text().splitlines() if trace.exists() else []
    return [(int(line["input_length"]), int(line["output_length"])) for line in map(json.loads, lines)]


def wrong(
    recorded: Iterable[Lengths], answered: Iterable[Lengths], stopped: Iterable[Lengths], left: int
) -> str:
    """What does not fit, "" if nothing: each answered request is recorded once, and at most each one that left.

    `stopped`: answers that a stop string ended. The front end finds it, EngineCore may have made more by then.
    """
    rest = Counter(recorded)
    missing = Counter(answered)
    lost = missing - rest
    rest -= missing
    for prompt, output in sorted(stopped, reverse=True):
        fits = [each for each in rest if each[0] == prompt and each[1] >= output]
        if fits:
            rest -= Counter([min(fits)])
        else:
            lost[prompt, output] += 1
    if lost:
        return f"{lost.total()} answered requests are not recorded, the first {next(iter(lost))}"
    extra = rest.total()
    return f"{extra} more recorded than answered, {left} clients left" if extra > left else ""
