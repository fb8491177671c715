"""Reads recorded agent sessions in the format of callanjfox/kv-cache-tester: a JSON file is one session.

A request has lengths, times and the ids of its prompt's full blocks. An id stands for the whole prompt up to its
block's end, so the ids that are known are the first ones. Every error names the file, the request and the field.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from kvtune.base.bounded import Budget, decode_json_as
from kvtune.base.errors import UsageError, reason
from kvtune.base.files import read_regular
from kvtune.requests.loads.sessions import Node, Session
from kvtune.requests.loads.trace_rows import invalid
from kvtune.requests.log.opened import RUN_FILE, is_run_file
from kvtune.requests.types import Span

SHOWN = "docs/workloads.md shows the format"
MOST_BYTES = 256 << 20
LIMITS = Budget(MOST_BYTES, 2 << 30)
MOST_FILES = 100_000

_Tokens = Annotated[int, msgspec.Meta(ge=0, le=1 << 24)]
_Prompt = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class _Asked(msgspec.Struct, tag_field="type", tag="n", forbid_unknown_fields=True, gc=False):
    """A request. `think_time`: from the answer before to this request; `api_time`: until its answer had come."""

    t: _Seconds
    prompt: _Prompt = msgspec.field(name="in")
    out: _Tokens
    hash_ids: list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]]
    think_time: _Seconds | None = None
    api_time: _Seconds | None = None
    model: str = ""
    ttft: _Seconds | None = None
    input_types: list[str] = []
    output_types: list[str] = []
    stop: str | None = ""


class _Streamed(_Asked, tag_field="type", tag="s", forbid_unknown_fields=True, gc=False):
    """A request whose answer was streamed."""


class _Agent(msgspec.Struct, tag_field="type", tag="subagent", forbid_unknown_fields=True):
    """A sub-agent. `t` is when it ENDED. Of one that has no duration the session did not wait for the end."""

    t: _Seconds
    requests: list[_Asked | _Streamed]
    duration_ms: Annotated[float, msgspec.Meta(ge=0, le=1e12)] | None = None
    status: str = ""
    tool_tokens: _Tokens = 0
    system_tokens: _Tokens = 0
    agent_id: str = ""
    subagent_type: str = ""
    total_tokens: int | None = None
    tool_use_count: int | None = None
    models: list[str] = []

    @property
    def awaited(self) -> bool:
        return bool(self.duration_ms) and self.status != "async_launched"

    @property
    def begun_s(self) -> float:
        return self.t - (self.duration_ms or 0.0) / 1000.0


class _Trace(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    block_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
    hash_id_scope: Literal["local"]
    requests: list[_Asked | _Streamed | _Agent]
    tool_tokens: _Tokens = 0
    system_tokens: _Tokens = 0
    models: list[str] = []
    totals: dict[str, int | float | dict[str, int | float]] = {}


Files = tuple[tuple[Path, int, int], ...]
"""Files with their sizes and times of change."""


def files_of(folder: Path, limit: int = 0) -> Files:
    """Return a folder's .json files, or one file; the first `limit` by name (0: all)."""
    try:
        files = sorted(folder.glob("*.json")) if folder.is_dir() else [folder]
        stamps = tuple(
            (file, file.stat().st_size, file.stat().st_mtime_ns) for file in files[: limit or None]
        )
    except OSError as error:
        raise UsageError(f"cannot read {folder}: {reason(error)}", "check path= in the workload") from error
    if not stamps:
        raise UsageError(
            f"cannot read {folder}: no .json file is in it", f"path= names a folder of sessions; {SHOWN}"
        )
    if len(stamps) > MOST_FILES:
        raise UsageError(f"{folder} has more than {MOST_FILES:,} sessions", "take a part of them: limit=")
    return stamps


def recorded(files: Files) -> tuple[Session, ...]:
    """Read the sessions of these files."""
    return tuple(session(file) for file, _, _ in files)


def session(file: Path) -> Session:
    """Read one session."""
    try:
        content = read_regular(file, MOST_BYTES)
    except OSError as error:
        raise UsageError(f"cannot read {file}: {reason(error)}", "check path= in the workload") from error
    if is_run_file(content):
        raise UsageError(f"{file} {RUN_FILE[0]}", RUN_FILE[1])
    try:
        trace = decode_json_as(content, _Trace, LIMITS)
    except ValueError as error:
        raise UsageError(
            f"{file}: {invalid(content, _Trace, error)}",
            f"repair or remove the file: {SHOWN}; a torn one was still being written",
        ) from error
    calls: list[_Call] = []
    try:
        _chain(trace.requests, calls, _Chain((), 0.0, trace.tool_tokens, 0))
    except UsageError as error:
        raise UsageError(f"{file}: session {trace.id!a}, {error.message}", error.hint) from error
    if not calls:
        raise UsageError(f"{file}: session {trace.id!a} has no requests", "remove the file")
    return Session(file.stem, _linked(file, trace, calls))


@dataclass(frozen=True, slots=True)
class _Call:
    """A request with what it waits for. `agent`: 0 of the session itself, else the sub-agent's number."""

    asked: _Asked
    after: tuple[int, ...]
    think_s: float
    tools: int
    agent: int


@dataclass(frozen=True, slots=True)
class _Chain:
    """Where a chain of requests begins. `think_s`: the pause before its first request."""

    after: tuple[int, ...]
    think_s: float
    tools: int
    agent: int


def _chain(requests: Sequence[_Asked | _Agent], calls: list[_Call], chain: _Chain) -> tuple[int, ...]:
    """Append a chain's requests in order; return what waits for its end has to wait for.

    A request after sub-agents is sent when the last of them has ended: its own pause holds the wait for them, so only
    the time from the last one's end to its sending counts.
    """
    waits, think_s = chain.after, chain.think_s
    sent_s = 0.0
    ended_s: float | None = None
    agents: list[_Agent] = []
    for request in requests:
        if isinstance(request, _Agent):
            agents.append(request)
            continue
        if ended_s is not None:
            if request.think_time is None and request.t < sent_s:
                raise UsageError(
                    f"request with t={request.t:g}: sent before the one in front of it (t={sent_s:g}), and no "
                    "think_time says the pause",
                    f"put the requests in order, or give think_time; {SHOWN}",
                )
            think_s = max(request.t - ended_s, 0.0) if request.think_time is None else request.think_time
        joined, last_s = _agents(agents, calls, waits, ended_s or 0.0)
        agents = []
        if joined:
            waits, think_s = joined, max(request.t - last_s, 0.0)
        calls.append(_Call(request, waits, think_s, chain.tools, chain.agent))
        waits, sent_s, ended_s = (len(calls) - 1,), request.t, request.t + (request.api_time or 0.0)
    _agents(agents, calls, waits, ended_s or 0.0)
    return waits


def _agents(
    agents: Sequence[_Agent], calls: list[_Call], waits: tuple[int, ...], ended_s: float
) -> tuple[tuple[int, ...], float]:
    """Append the requests of sub-agents, begun after the session's last answer; return the awaited ends, and when."""
    ends: list[int] = []
    last_s = 0.0
    for agent in agents:
        if not agent.requests:
            continue
        think_s = max(agent.begun_s - ended_s, 0.0) if agent.duration_ms else 0.0
        last = _chain(agent.requests, calls, _Chain(waits, think_s, agent.tool_tokens, len(calls) + 1))
        if agent.awaited:
            ends += last
            last_s = max(last_s, agent.t)
    return tuple(sorted(set(ends))), last_s


def _linked(file: Path, trace: _Trace, calls: Sequence[_Call]) -> tuple[Node, ...]:
    """Return the requests with what each prompt has in common with an earlier one."""
    block = trace.block_size
    first: dict[int, int] = {}  # id -> the first request with it
    last: dict[tuple[int, int], int] = {}  # (id, agent) -> the last request whose prompt's last id it is
    begun: set[int] = set()
    nodes: list[Node] = []
    for number, call in enumerate(calls):
        asked, ids = call.asked, call.asked.hash_ids
        where = f"{file}: session {trace.id!a}, request {number} (t={asked.t:g})"
        if len(ids) != asked.prompt // block:
            raise UsageError(
                f"{where}: {len(ids):,} hash_ids for in={asked.prompt:,}, which has {asked.prompt // block:,} full "
                f"blocks of {block}",
                "hash_ids needs one id for each full block of the prompt",
            )
        shared_ids = bisect_left(ids, 1, key=lambda hash_id: hash_id not in first)
        if not first.keys().isdisjoint(ids[shared_ids:]):
            raise UsageError(
                f"{where}: hash_ids has a known id after the new id {ids[shared_ids]}",
                "an id stands for the whole prompt up to its block's end",
            )
        parent, common = -1, 0
        if shared_ids:
            parent, common = first[ids[shared_ids - 1]], shared_ids * block
            if calls[parent].asked.hash_ids[:shared_ids] != ids[:shared_ids]:
                raise UsageError(
                    f"{where}: hash_ids has {ids[shared_ids - 1]} after other ids than request {parent} has",
                    "an id stands for the whole prompt up to its block's end",
                )
            continued = last.get((ids[shared_ids - 1], call.agent), -1)
            if continued >= 0 and nodes[continued].tokens <= asked.prompt:
                before = nodes[continued]
                parent, common = continued, before.tokens
                if before.tokens + before.output <= asked.prompt:
                    common += before.output
        head: tuple[Span, ...] = ()
        if parent < 0 and call.tools and call.tools not in begun:
            begun.add(call.tools)  # in one session, ids tell whether two prompts begin alike
            head = (Span(call.tools, 0, min(call.tools, asked.prompt)),)  # equally long tools: the same
        nodes.append(
            Node(
                asked.prompt,
                max(asked.out, 1),
                call.after,
                call.think_s,
                parent,
                common,
                bool(call.agent),
                head,
            )
        )
        for hash_id in ids[shared_ids:]:
            first[hash_id] = number
        if ids:
            last[ids[-1], call.agent] = number
    return tuple(nodes)
