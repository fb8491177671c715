"""One request as it is recorded: in memory, and as a line of a log (docs/logs.md). Pure."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtune.requests.log.bodies import Note

PIECE = 4096
"""Token ids that are written as text at once: a long prompt takes little more memory than its text."""
LONGEST_NAME = 200
"""Characters of a name that a client or a router chooses. Longer ones are written as their hash."""


@dataclass(frozen=True, slots=True)
class Logged:
    """One request. `t0`, `t1`: when it was sent and answered, in seconds since 1970; None: not known, or not yet.

    `ttft`: seconds from sending until the first token; None: not known.
    `hit`: prompt tokens that the server reported as cached, `output_tokens`: of the answer, whose ids may not be known;
    -1: not known. `salt`: vLLM's `cache_salt`; requests with different salts share no cache. `session`: the session id
    that the server saw. `kind`: the client's own class of the request. `replica`: the name of the engine that served
    it. `line`: of the log. `how`: what rendered its text; "" if the log has token ids. `notes`: what the server did to
    the prompt by itself.
    """

    name: str
    prompt: Sequence[int]
    answer: Sequence[int] = ()
    t0: float | None = None
    t1: float | None = None
    hit: int = -1
    salt: str = ""
    session: str = ""
    ttft: float | None = None
    output_tokens: int = 0
    kind: str = ""
    replica: str = ""
    line: int = 0
    how: str = ""
    notes: tuple[Note, ...] = ()

    @property
    def cached_at(self) -> float | None:
        """When its prompt was computed: with the first token, or at the latest with the last; None: not known."""
        return self.t0 + self.ttft if self.t0 is not None and self.ttft is not None else self.t1


def line_of(
    request: Logged, *, by: str = "", api: str = "", prompt_tokens: int = -1, **more: object
) -> dict[str, Any]:
    """Return the line of a log. What is not known is left out: -1, None, "".

    `by`: who writes it. `prompt_tokens`: as the server counted them. `more`: other fields.
    """
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": request.output_tokens}
    line: dict[str, Any] = {"by": by or None, "name": request.name, "t0": request.t0, "t1": request.t1}
    line |= {"ttft": None if request.ttft is None else round(request.ttft, 6), "kind": request.kind or None}
    line |= {"replica": request.replica or None}
    line |= {"url": api or None, "session_id": short(request.session) or None}
    line |= {"cache_salt": short(request.salt) or None, "hit": request.hit if request.hit >= 0 else None}
    line |= {**more, "usage": {key: count for key, count in usage.items() if count >= 0}}
    fields = {key: value for key, value in line.items() if value is not None}
    return fields | {"prompt_token_ids": request.prompt, "answer": request.answer}


def short(name: str) -> str:
    """Return a name that another chose, or the hash of one that is text rather than a name."""
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
        text += b"]}"
    return text + b"\n"
