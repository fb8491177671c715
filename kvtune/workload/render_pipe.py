"""Messages between the two ends of a rendering, and what a question may take.

Bodies are sent as one question of parts; each of them gets an answer.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable
from typing import Any

import msgspec

from kvtune.workload.bodies import Body, Note, Rendered

LOAD, BODIES, TEXT = range(3)
"""Kinds of questions: load the tokenizer of this name, render bodies, text of ids."""
LOAD_S = 120.0
RENDER_S = 10.0
MIB_S = 10.0
"""CPU time for each MiB of a body: tokenizers take about a second."""
WAIT = 10
"""How many times as long as its CPU time a question may take."""
LOAD_BYTES = 3 << 30
RENDER_BYTES = 1 << 30
BYTE_BYTES = 64
"""Memory for each byte of a body: its tokens, each with its place, its text and its mask."""


class Question(msgspec.Struct, frozen=True, tag="question"):
    kind: int
    parts: list[bytes]


class Made(msgspec.Struct, frozen=True, tag="made"):
    """An answer: what renders, a text, or the ids of a body with its notes."""

    content: bytes
    notes: list[list[Any]] = []


def packed(bodies: Iterable[Body]) -> list[bytes]:
    """Return each body as bytes."""
    return [json.dumps(body).encode() for body in bodies]


def unpacked(part: bytes) -> Body:
    return Body(*json.loads(part))


def of_answer(made: Made, how: str) -> Rendered:
    ids = array("I")
    ids.frombytes(made.content)
    return Rendered(ids, how, tuple(Note(*note) for note in made.notes))


def cpu_s(kind: int, length: int, render_s: float = RENDER_S) -> float:
    """Return the CPU time that a question may take. `render_s`: that of the shortest body."""
    return LOAD_S if kind == LOAD else render_s + MIB_S * length / (1 << 20)


def memory_bytes(kind: int, length: int) -> int:
    """Return the memory that a question may take beside that of the process before it."""
    return (LOAD_BYTES if kind == LOAD else RENDER_BYTES) + BYTE_BYTES * length
