"""Input of `kvtune bounds`: pool sizes, a model's shape; its progress. In the command's process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import inf, nextafter
from typing import TypeVar

from kvtune.base.errors import UsageError, did_you_mean
from kvtune.data.layout.config import shape_of
from kvtune.data.layout.model_config import model_config
from kvtune.data.layout.models import NAMES, SHAPES, TINY
from kvtune.data.layout.plan import ModelShape
from kvtune.data.show.terminal import redraw

_SUFFIX = {"k": 1_000, "m": 1_000_000}
Size = TypeVar("Size", int, float)


def parse_pools(text: str) -> list[int]:
    """Parse `25k,100k` to [25000, 100000]; UsageError for anything but numbers of blocks."""

    def blocks(part: str) -> int:
        number, factor = (part[:-1], _SUFFIX[part[-1]]) if part[-1] in _SUFFIX else (part, 1)
        return int(float(number) * factor)

    return _parsed(text, blocks, 1, "--pools", "number of blocks", "25k,100k,400k")


def parse_tiers(text: str) -> list[float]:
    """Parse `1x,2x,4x` to [1, 2, 4]; UsageError for anything but positive multiples."""
    least = nextafter(0, 1)
    return _parsed(
        text,
        lambda part: float(part.removesuffix("x")),
        least,
        "--tier",
        "multiple of the pool",
        "1x,2x,4x,8x",
    )


def _parsed(
    text: str, value: Callable[[str], Size], least: float, option: str, what: str, example: str
) -> list[Size]:
    """Return what an option lists, sorted, each once. UsageError for what is none, or less than `least`."""
    values = set()
    for part in filter(None, (part.strip().lower() for part in text.split(","))):
        try:
            values.add(made := value(part))
        except (ValueError, OverflowError):
            made = None
        if made is None or not least <= made < inf:
            raise UsageError(f"{option}: {part!r} is not a {what}", f"for instance {option} {example}")
    return sorted(values)


def shape_named(model: str) -> ModelShape:
    """Return the KV shape of a built-in model, a folder with config.json, or a name on the hub."""
    config = model_config(model)
    if not config.fields:
        raise UsageError(
            f"--model {model}: {config.why}",
            f"{did_you_mean(model, (*TINY, *SHAPES))}give a folder with config.json, or one of {', '.join(NAMES)}",
        )
    return shape_of(config.fields, model)


@contextmanager
def progress() -> Iterator[Callable[[int, int], None]]:
    """Show progress on stderr: on a terminal in one line that is removed at the end, else line by line."""
    terminal = sys.stderr.isatty()

    say = redraw if terminal else partial(print, file=sys.stderr, flush=True)

    say("computing bounds ..")
    try:
        yield lambda number, total: say(f"pool sizes {number}/{total}")
    finally:
        if terminal:
            redraw("")
