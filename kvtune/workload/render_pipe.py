"""Messages between the two ends of a rendering, and what a question may take.

A message is a byte that names its kind, the length of its content in 4 bytes, and the content.
"""

from __future__ import annotations

from typing import IO

LOAD, IDS, TEXT, ANSWER, REFUSED = range(5)
"""Kinds of messages: load the tokenizer of this name, ids of a body (JSON), text of ids; answers, and refusals."""
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


def cpu_s(kind: int, length: int) -> float:
    """Return the CPU time that a question may take."""
    return LOAD_S if kind == LOAD else RENDER_S + MIB_S * length / (1 << 20)


def memory_bytes(kind: int, length: int) -> int:
    """Return the memory that a question may take beside that of the process before it."""
    return (LOAD_BYTES if kind == LOAD else RENDER_BYTES) + BYTE_BYTES * length
