"""The log of requests that a tap and the middleware write (docs/requests-log.md), which other commands read.

Token ids, times, counts; with `body` also text. Only this user can read it: token ids are text in another form. What
cannot be written is left out and counted, and later lines are tried again. Loaded in vLLM's API servers, too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvtune.errors import reason
from kvtune.files import lines_descriptor, write_lines

BY = "kvtune tap"
START = b'{"by": "kvtune tap", '


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
    said = {"kind": client, "url": api, "session_id": session, "cache_salt": salt}
    line |= {key: value for key, value in said.items() if value}
    if hit >= 0:
        line["hit"] = hit
        if hit_by != "usage":
            line["hit_by"] = hit_by
    line["usage"] = {key: count for key, count in usage.items() if count >= 0}
    if how != "whole":
        line["broken_off_by"] = how
    line |= {"prompt_token_ids": list(prompt), "answer": list(answer)}
    if body is not None:
        line["body"] = dict(body)
    return line


class LogFile:
    """Appends lines to a new file, or to a log of kvtune. FileExistsError for any other file; OSError if it cannot."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = lines_descriptor(path, START)
        self.written = 0
        self.dropped = 0
        self.why = ""
        """Why the last line was not written; "" if it was."""

    def add(self, line: Mapping[str, Any]) -> bool:
        """Write a line. Return whether it is in the file."""
        try:
            text = json.dumps(line).encode() + b"\n"
            self.why = "" if write_lines(self._descriptor, text) else "the disk is full"
        except (OSError, ValueError) as error:
            self.why = reason(error)
        if self.why:
            self.dropped += 1
            return False
        self.written += 1
        return True
