"""The log of requests that a tap and the middleware write (docs/requests-log.md), which other commands read.

Token ids, times, counts; with `body` also text. Only this user can read it: token ids are text in another form. What
cannot be written is left out and counted, and later lines are tried again, in a new file if this one was moved or
removed. Loaded in vLLM's API servers, too: no step of a long line keeps other threads waiting.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvtune.errors import reason
from kvtune.files import lines_descriptor, write_lines

BY = "kvtune tap"
START = b'{"by": "kvtune tap", '
PIECE = 4096
"""Token ids that are written as text at once, in 1 or 2 ms; other threads run between two pieces."""
LONGEST_NAME = 200
"""Characters of a session id and a salt, which a client chooses. Longer ones are written as their hash."""


def row(
    name: str,
    *,
    prompt: Sequence[int],
    answer: Sequence[int] = (),
    began: float,
    ended: float,
    first: float = 0.0,
    client: str = "",
    api: str = "",
    hit: int = -1,
    hit_by: str = "usage",
    prompt_tokens: int = -1,
    output_tokens: int = -1,
    salt: str = "",
    session: str = "",
    how: str = "whole",
    body: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return one line of the log. What is not known is left out: -1, 0.0, "".

    `first`: when the first token came. `hit_by`: who counted the hit. `how`: other than "whole": the answer is not
    whole. `body`: the request's text.
    """
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": output_tokens}
    line: dict[str, Any] = {"by": BY, "name": name, "t0": began, "t1": ended}
    if first > began:
        line["ttft"] = round(first - began, 6)
    said = {"kind": client, "url": api, "session_id": short(session), "cache_salt": short(salt)}
    line |= {key: value for key, value in said.items() if value}
    if hit >= 0:
        line["hit"] = hit
        if hit_by != "usage":
            line["hit_by"] = hit_by
    line["usage"] = {key: count for key, count in usage.items() if count >= 0}
    if how != "whole":
        line["broken_off_by"] = how
    if body is not None:
        line["body"] = dict(body)
    return line | {"prompt_token_ids": prompt, "answer": answer}


def short(name: str) -> str:
    """Return a name that a client chose, or the hash of one that is text rather than a name."""
    if len(name) <= LONGEST_NAME:
        return name
    return f"blake2b-{hashlib.blake2b(name.encode(errors='surrogatepass'), digest_size=16).hexdigest()}"


def encoded(line: Mapping[str, Any]) -> bytearray:
    """Return a line of the log as JSON. ValueError for token ids that are none."""
    lists = {name: value for name, value in line.items() if name in ("prompt_token_ids", "answer")}
    text = bytearray(json.dumps({name: value for name, value in line.items() if name not in lists}).encode())
    for name, ids in lists.items():
        text[-1:] = f', "{name}": ['.encode()
        for begin in range(0, len(ids), PIECE):
            try:
                piece = array("I", ids[begin : begin + PIECE])
            except (OverflowError, TypeError):
                raise ValueError(f"{name} has a value that is no token id") from None
            text += (", " if begin else "").encode() + ", ".join(map(str, piece)).encode()
            time.sleep(0)
        text += b"]}"
    return text + b"\n"


class LogFile:
    """Appends lines to a new file, or to a log of kvtune. Any other file is left as it is.

    `refused`: why the log's readers would refuse a line; "" if they take it. None: its lines are the engine's own.
    """

    def __init__(self, path: Path, refused: Callable[[bytes], str] | None = None) -> None:
        self.path = path
        self._refused = refused
        self._descriptor = -1
        self.missing = 0
        """Lines that could not be written since the last one that was."""
        self.why = ""
        """Why the last line was not written; "" if it was."""
        self.news = ""
        """What a person should know since the last line; "": nothing."""

    def open(self) -> None:
        """Open the file where its name stands now. OSError if it cannot."""
        with contextlib.suppress(FileNotFoundError):
            there, ours = self.path.stat(), self._descriptor
            if ours >= 0 and os.path.samestat(there, os.fstat(ours)):
                return
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            self.news = f"{self.path} was moved or removed: a new log is written"
        self._descriptor = lines_descriptor(self.path, START)

    def add(self, line: Mapping[str, Any]) -> bool:
        """Write a line. Return whether it is in the file."""
        self.news = self.why = ""
        try:
            text = encoded(line)
            self.why = self._refused(bytes(text)) if self._refused is not None else ""
            if self.why:
                return False
        except ValueError as error:
            self.why = reason(error)
            return False
        try:
            self.open()
            self.why = "" if write_lines(self._descriptor, text) else "the disk is full"
        except OSError as error:
            self.why = reason(error)
        if self.why:
            self.missing += 1
            self.news = f"{self.path} cannot be written: {self.why}"
            return False
        if self.missing:
            self.news = f"{self.path} is written again: {self.missing} requests are missing in it"
            self.missing = 0
        return True
