"""A run in speedscope's format: one profile per process, with steps, phases and collections nested."""

from __future__ import annotations

from typing import Literal, TypedDict

from kvtune.report.export.spans import TimeSpan, collection_spans, process_numbers, step_spans
from kvtune.report.names import process_name
from kvtune.run.signature import run_identity, signature
from kvtune.run.types import Run

SCHEMA = "https://www.speedscope.app/file-format-schema.json"
ROUNDING_US = 0.5  # spans that overlap by less follow each other, neither contains the other


class SpanEvent(TypedDict):
    """The opening ("O") or closing ("C") of a frame, at a time in microseconds."""

    type: Literal["O", "C"]
    frame: int
    at: float


def speedscope(run: Run) -> dict[str, object]:
    """Return the file as one JSON object. Processes without a step or a collection are left out."""
    frames: dict[str, int] = {}
    profiles = []
    for process in process_numbers(run):
        spans = [*step_spans(run, process), *collection_spans(run, process)]
        if not spans:
            continue
        events = _nested(spans, frames)
        profiles.append(
            {
                "type": "evented",
                "name": process_name(run, process),
                "unit": "microseconds",
                "startValue": min(events[0]["at"], 0),
                "endValue": max(events[-1]["at"], run.header.wall_s * 1e6),
                "events": events,
            }
        )
    return {
        "$schema": SCHEMA,
        "exporter": signature(run_identity(run.header)),
        "name": f"{run.header.model}, {run.header.workload.spec}",
        "activeProfileIndex": 0,
        "shared": {"frames": [{"name": name} for name in frames]},
        "profiles": profiles,
    }


def _nested(spans: list[TimeSpan], frames: dict[str, int]) -> list[SpanEvent]:
    """Return opening and closing events in order of time. A span is cut at the end of the span that contains it."""
    events: list[SpanEvent] = []
    open_spans: list[tuple[int, float]] = []

    def close(until: float) -> None:
        while open_spans and open_spans[-1][1] <= until + ROUNDING_US:
            frame, end = open_spans.pop()
            events.append({"type": "C", "frame": frame, "at": min(end, until)})

    for span in sorted(spans, key=lambda s: (s.start_us, -s.end_us)):
        close(span.start_us)
        frame = frames.setdefault(span.name, len(frames))
        end = min(span.end_us, open_spans[-1][1]) if open_spans else span.end_us
        events.append({"type": "O", "frame": frame, "at": span.start_us})
        open_spans.append((frame, end))
    close(float("inf"))
    return events
