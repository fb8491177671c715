"""Messages between the two ends of a rendering, and what a question may take.

A message is a byte that names its kind, the length of its content in 4 bytes, and the content. Bodies are sent as one
message of parts, each with its length in front; each of them gets an answer.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator
from typing import IO

from kvtune.workload.bodies import Body, Note, Rendered

LOAD, BODIES, TEXT, ANSWER, REFUSED = range(5)
"""Kinds of messages: load the tokenizer of this name, render bodies, text of ids; answers, and refusals."""
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


def sent(stream: IO[bytes], kind: int, content: bytes) -> None:
    stream.write(bytes((kind,)) + len(content).to_bytes(4, "little") + content)
    stream.flush()


def received(stream: IO[bytes]) -> tuple[int, bytes]:
    """Read a message. EOFError if the other end is gone."""
    head = stream.read(5)
    if len(head) < 5:
        raise EOFError
    content = stream.read(length := int.from_bytes(head[1:], "little"))
    if len(content) < length:
        raise EOFError
    return head[0], content


def packed(bodies: Iterable[Body]) -> list[bytes]:
    """Return each body as bytes."""
    return [json.dumps(body).encode() for body in bodies]


def joined(parts: Iterable[bytes]) -> bytes:
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


def divided(content: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(content):
        end = at + 4 + int.from_bytes(content[at : at + 4], "little")
        yield content[at + 4 : end]
        at = end


def unpacked(part: bytes) -> Body:
    return Body(*json.loads(part))


def as_answer(rendered: Rendered) -> bytes:
    return joined((json.dumps(rendered.notes).encode(), array("I", rendered.ids).tobytes()))


def of_answer(content: bytes, how: str) -> Rendered:
    notes, tokens = divided(content)
    ids = array("I")
    ids.frombytes(tokens)
    return Rendered(ids, how, tuple(Note(*note) for note in json.loads(notes)))


def cpu_s(kind: int, length: int, render_s: float = RENDER_S) -> float:
    """Return the CPU time that a question may take. `render_s`: that of the shortest body."""
    return LOAD_S if kind == LOAD else render_s + MIB_S * length / (1 << 20)


def memory_bytes(kind: int, length: int) -> int:
    """Return the memory that a question may take beside that of the process before it."""
    return (LOAD_BYTES if kind == LOAD else RENDER_BYTES) + BYTE_BYTES * length
