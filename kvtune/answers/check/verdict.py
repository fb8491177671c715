"""Makes the answer of a check of what was asked: each path judged, and what wrong hits share. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from kvtune.answers.check.common import Features, common
from kvtune.answers.check.course import Course
from kvtune.answers.check.judge import Verdict, judged, limit, parts_at
from kvtune.answers.check.paths import Path, why_not
from kvtune.answers.check.result import Check, Compared, OfPath
from kvtune.data.show.terminal import one_line

ORDER: tuple[Verdict, ...] = ("differs", "cannot tell", "as cold", "not shown")


def answer(course: Course, chosen: Mapping[str, Path], fill: bool, version: str) -> Check:
    """Judge what was asked. The worst of the paths' verdicts is that of the check."""
    beyond = limit(row.nats for row in course.compared if row.path == "null")
    cold = _of_path("null", "cold again", course, beyond)
    exchanged = _of_path("exchanged", "one block exchanged", course, beyond)
    paths = []
    for name, path in chosen.items():
        row = _of_path(name, path.title, course, beyond)
        verdict, seen, more = judged(row.wrong, row.hits, exchanged.wrong / max(1, exchanged.hits))
        why = why_not(name, path, course.layout, fill) or ("" if row.hits else "no request hit like that")
        paths.append(replace(row, verdict=verdict, seen_with=seen, more=more, why_not=why))
    hits = [row for row in course.compared if row.path in chosen and row.taken]
    return Check(
        url=course.asker.server.base,
        model=one_line(course.asker.model),
        version=version,
        verdict="differs" if course.unsalted else min((each.verdict for each in paths), key=ORDER.index),
        requests=course.asker.sent,
        computed_tokens=course.asker.computed,
        layout=course.layout,
        limit_nats=beyond,
        unsalted=course.unsalted,
        cold=cold,
        exchanged=exchanged,
        paths=paths,
        common=common([(_features(course, chosen, row), row.nats > beyond) for row in hits]),
    )


def _of_path(name: str, title: str, course: Course, beyond: float) -> OfPath:
    asked = [row for row in course.compared if row.path == name]
    hits = [row for row in asked if row.taken]
    return OfPath(
        name=name,
        title=title,
        asked=len(asked),
        hits=len(hits),
        wrong=sum(row.nats > beyond for row in hits),
        equal=sum(parts_at(row.cold, row.answer) is None for row in hits),
        nats=max((row.nats for row in hits), default=0.0),
    )


def _features(course: Course, chosen: Mapping[str, Path], row: Compared) -> Features:
    """Return what may decide whether a hit is wrong."""
    features: dict[str, str | int] = {
        "path:": chosen[row.path].title,
        "tokens that hit:": row.cached,
        "tokens of the prompt:": len(row.ids),
        "requests since it was primed:": row.age,
    }
    for block in course.layout.blocks:
        features[f"tokens of the prompt beyond blocks of {block}:"] = len(row.ids) % block
        features[f"tokens that hit beyond blocks of {block}:"] = row.cached % block
    if window := course.layout.window:
        features[f"tokens that hit beyond a window of {window}:"] = max(0, row.cached - window)
    return features
