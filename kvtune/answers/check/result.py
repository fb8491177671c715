"""What `kvtune check` answers: each path judged, and the hits that are wrong."""

from __future__ import annotations

import msgspec

from kvtune.answers.check.course import Compared, Course
from kvtune.answers.check.judge import Verdict, judged, limit, parts_at
from kvtune.answers.check.paths import COLD, PATHS, Layout, why_not
from kvtune.data.show.terminal import one_line

ORDER: tuple[Verdict, ...] = ("differs", "cannot tell", "as cold", "not shown")


class OfPath(msgspec.Struct, frozen=True, kw_only=True):
    """A path's hits. `hits`: of `asked` requests, those that were proved to take it; `equal`: with the cold tokens.

    `nats`: the largest distance from a cold answer.
    """

    name: str
    title: str
    verdict: Verdict
    why_not: str
    asked: int
    hits: int
    wrong: int
    equal: int
    nats: float
    seen_with: float
    more: int


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """`cold`: cold answers compared with each other; `exchanged`: answers to prompts with a block of another one.

    `unsalted`: requests with a fresh cache_salt that hit all the same. `differ`: the wrong hits. `again`: the command.
    """

    schema: int = 1
    url: str
    model: str
    version: str
    verdict: Verdict
    requests: int
    computed_tokens: int
    layout: Layout
    limit_nats: float
    unsalted: int
    cold: OfPath
    exchanged: OfPath
    paths: list[OfPath]
    differ: list[Compared]
    again: str


def answer(course: Course, again: str) -> Check:
    """Judge what was asked. The worst of the paths' verdicts is that of the check."""
    beyond = limit(row.nats for row in course.compared if row.path == "null")
    exchanges = [row.nats > beyond for row in course.compared if row.path == "exchanged"]
    cold, exchanged, *paths = (
        _of_path(name, title, course, beyond, sum(exchanges) / max(1, len(exchanges)))
        for name, title in {**COLD, **PATHS}.items()
    )
    return Check(
        url=course.server.base,
        model=one_line(course.model),
        version=course.server.version(),
        verdict="differs" if course.unsalted else min((each.verdict for each in paths), key=ORDER.index),
        requests=course.sent,
        computed_tokens=course.computed,
        layout=course.layout,
        limit_nats=beyond,
        unsalted=course.unsalted,
        cold=cold,
        exchanged=exchanged,
        paths=paths,
        differ=[row for row in course.compared if row.path in PATHS and row.taken and row.nats > beyond],
        again=again,
    )


def _of_path(name: str, title: str, course: Course, beyond: float, seen: float) -> OfPath:
    asked = [row for row in course.compared if row.path == name]
    hits = [row for row in asked if row.taken]
    wrong = sum(row.nats > beyond for row in hits)
    verdict, seen_with, more = judged(wrong, len(hits), seen)
    return OfPath(
        name=name,
        title=title,
        verdict=verdict,
        why_not=why_not(name, course.layout, course.fill) or ("" if hits else "no request hit like that"),
        asked=len(asked),
        hits=len(hits),
        wrong=wrong,
        equal=sum(parts_at(row.cold, row.answer) is None for row in hits),
        nats=max((row.nats for row in hits), default=0.0),
        seen_with=seen_with,
        more=more,
    )
