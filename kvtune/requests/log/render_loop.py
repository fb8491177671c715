"""What the processes that render are asked, and do: they answer each question under limits of time and memory.

Bodies are sent as one question of parts; each of them gets an answer. The system ends a template that loops at the CPU
time that its prompt may take; one that makes too much text gets a MemoryError.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from kvtune.base.dialogue import Refused, questions, tell
from kvtune.base.errors import UsageError
from kvtune.requests.log.bodies import Body, Note, Rendered

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

    def rendered(self, reason: str) -> Rendered:
        ids = array("I")
        ids.frombytes(self.content)
        return Rendered(ids, reason, tuple(Note(*note) for note in self.notes))


def cpu_s(kind: int, length: int, render_s: float = RENDER_S) -> float:
    """Return the CPU time that a question may take. `render_s`: that of the shortest body."""
    return LOAD_S if kind == LOAD else render_s + MIB_S * length / (1 << 20)


def memory_bytes(kind: int, length: int) -> int:
    """Return the memory that a question may take beside that of the process before it."""
    return (LOAD_BYTES if kind == LOAD else RENDER_BYTES) + BYTE_BYTES * length


class Loaded(Protocol):
    """A tokenizer and what renders with it. `how` is shown with what it rendered."""

    how: str

    def rendered(self, body: Body) -> Rendered: ...

    def text(self, ids: Sequence[int]) -> str: ...


def serve(load: Callable[[str], Loaded]) -> None:
    """Answer questions until there are no more. The last word of the command line is the shortest body's CPU time."""
    answers, render_s = int(sys.argv[1]), float(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the command, which ends this process
    asked = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    rendering, base = Rendering(load), size()
    for question in questions(Question, asked):
        kind = question.kind
        for part in question.parts:
            _limit(cpu_s(kind, len(part), render_s), base + memory_bytes(kind, len(part)))
            reply = rendering.answer(kind, part)
            _limit(0.0, None)
            tell(answers, reply)
        if kind == LOAD:
            base = size()


class Rendering:
    """Answers questions."""

    def __init__(self, load: Callable[[str], Loaded]) -> None:
        self._load = load

    def answer(self, kind: int, content: bytes) -> Made | Refused:
        try:
            if kind == LOAD:
                self._loaded = self._load(content.decode())
                return Made(self._loaded.how.encode())
            if kind == BODIES:
                rendered = self._loaded.rendered(Body(*json.loads(content)))
                return Made(array("I", rendered.ids).tobytes(), [list(note) for note in rendered.notes])
            ids = array("I")
            ids.frombytes(content)
            return Made(self._loaded.text(ids).encode("utf-8", "surrogatepass"))
        except UsageError as error:
            return Refused.of(error)
        except BaseException as error:  # a panic of the tokenizer's Rust code is no Exception
            lines = str(error).strip().splitlines() or [""]
            what = f"{type(error).__name__}{': ' if lines[0] else ''}{lines[0][:200]}"
            return Refused(f"cannot be tokenized: {what}", "repair its text or the tokenizer")


def _limit(seconds: float, most_bytes: int | None) -> None:
    """Limit this process's CPU time from now on, its time, and its address space; 0 seconds, None: no limit."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, WAIT * seconds)
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    soft = hard if most_bytes is None else most_bytes
    if hard != resource.RLIM_INFINITY:
        soft = min(soft, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def size() -> int:
    """Return the address space of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
