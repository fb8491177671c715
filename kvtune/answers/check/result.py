"""What `kvtune check` answers: each path judged, the hits that are wrong, and what they have in common."""

from __future__ import annotations

from typing import get_args

import msgspec

from kvtune.answers.check.course import Asked, Compared, Course
from kvtune.answers.check.judge import RARE, Features, Verdict, common, judged
from kvtune.answers.check.paths import COLD, KERNEL, PATHS, TIER, Layout
from kvtune.base.statistics import fisher


class OfPath(msgspec.Struct, frozen=True):
    """A path's hits. `hits`: of `asked` requests, those that were proved to take it; `equal`: with the cold tokens.

    `nats`: the largest distance from a cold answer.
    """

    name: str
    why_not: str
    asked: int
    hits: int
    wrong: int
    equal: int
    nats: float
    verdict: Verdict
    seen_with: float
    more: int


class Check(Asked, kw_only=True):
    """`cold`: cold answers compared with each other; `exchanged`: answers to prompts with a block of another one.

    `differ`: the wrong hits.
    """

    schema: int = 1
    url: str
    version: str
    verdict: Verdict
    cold: OfPath
    exchanged: OfPath
    paths: list[OfPath]
    differ: list[Compared]
    common: str


def answer(course: Course) -> Check:
    """Judge what was asked. The worst of the paths' verdicts is that of the check."""
    beyond = course.limit_nats
    exchanges = [row.nats > beyond for row in course.compared if row.path == "exchanged"]
    seen = sum(exchanges) / max(1, len(exchanges))
    cold, exchanged, *paths = (_of_path(name, course, beyond, seen) for name in PATHS)
    worst = min((each.verdict for each in paths), key=get_args(Verdict).index)
    hits = [(row, row.nats > beyond) for row in course.compared if row.path not in COLD and row.taken]
    return Check(
        **{name: getattr(course, name) for name in Asked.__struct_fields__},
        url=course.server.base,
        version=course.server.version(),
        verdict="differs" if course.unsalted else worst,
        cold=cold,
        exchanged=exchanged,
        paths=paths,
        differ=[row for row, wrong in hits if wrong],
        common=common([(features(row, course.layout), wrong) for row, wrong in hits]),
    )


def features(row: Compared, layout: Layout) -> Features:
    """Return what may decide whether a hit is wrong, in words; the plainest first."""
    end = f"{'inside' if row.cached % layout.blocks[-1] else 'with'} a block of {layout.blocks[-1]:,}"
    shown = {"the hit is": "from a tier" if row.path in TIER else "local", "the hit ends": end}
    figures = {"the hit is of": row.cached, "requests since it was primed": row.age}
    figures |= {"the prompt's number": row.number}
    for block in (*layout.blocks, KERNEL):
        figures |= {f"hit mod {block}": row.cached % block, f"prompt mod {block}": len(row.ids) % block}
    return shown | {"the path is": PATHS[row.path]} | figures


def _of_path(name: str, course: Course, beyond: float, seen: float) -> OfPath:
    rows = [row for row in course.compared if row.path == name]
    hits = [row for row in rows if row.taken]
    repeats = [row.repeats for row in hits if row.nats > beyond]
    count, wrong, colds = len(hits), len(repeats), sum(row.path == "null" for row in course.compared)
    sure = any(repeats) or fisher(wrong, count, wrong, count + colds) < RARE
    why = course.why_not[name] or ("" if hits else "no request hit like that")
    equal = sum(row.cold.tokens == row.answer.tokens for row in hits)
    nats = max((row.nats for row in hits), default=0.0)
    return OfPath(name, why, len(rows), count, wrong, equal, nats, *judged(wrong, count, seen, sure))
