"""`vllm serve --middleware kvtune.servers.tap.Log` logs each request as the engine sees it.

Runs in vLLM's API servers, one log each: exact token ids, hits and request ids of every API, without rendering, also of
streams that the client breaks off. It wraps the engine client's `generate`, once. Nothing here raises into the server:
what goes wrong with a request's record loses that record. It keeps no header; of the user agent, the client's name.

The log is `KVTUNE_TAP_LOG`, with the process's number before its ending; by default kvtune-tap.PID.jsonl.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtune.base.errors import reason
from kvtune.requests.log.logged import PIECE, Logged, line_of
from kvtune.servers.tap.exchange import client_of
from kvtune.servers.tap.log import BY, LogFile

VARIABLE = "KVTUNE_TAP_LOG"
DEFAULT = "kvtune-tap.jsonl"
MOST_WAITING = 1_000
"""Requests that wait to be written. What exceeds that is not."""
END_S = 5.0
MARK = "_kvtune_tap"
CUMULATIVE, DELTA = "CUMULATIVE", "DELTA"
"""Names of vLLM's kinds of output: everything so far, and what is new."""

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
App = Callable[
    [Scope, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]
]


@dataclass(slots=True)
class Call:
    """One prompt that the engine was given. `first`: when its first token came, if tokens come one by one."""

    name: str
    session: str
    salt: str
    kind: str
    prompt: list[int] = field(default_factory=list)
    answers: dict[int, list[int]] = field(default_factory=dict)
    hit: int = -1
    first: float = 0.0
    finished: bool = False

    def take(self, output: Any) -> None:
        if not self.prompt:
            self.prompt = list(output.prompt_token_ids or ())
        if output.num_cached_tokens is not None:
            self.hit = output.num_cached_tokens
        for completion in output.outputs:
            answer = self.answers.setdefault(completion.index, [])
            if self.kind == CUMULATIVE:
                answer.clear()
            answer += completion.token_ids
            if self.kind in (CUMULATIVE, DELTA) and not self.first and answer:
                self.first = time.time()
        self.finished = output.finished


@dataclass(slots=True)
class Record:
    """One HTTP request and what the engine was given for it."""

    path: str
    client: str
    began: float
    calls: list[Call] = field(default_factory=list)


NOW: ContextVar[Record | None] = ContextVar("kvtune_tap", default=None)
"""The HTTP request that this task works for."""


class Log:
    """The middleware: a pure ASGI application around vLLM's."""

    def __init__(self, app: App) -> None:
        self.app = app
        self._writer = Writer()

    async def __call__(
        self,
        scope: Scope,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        record = self._begun(scope)
        if record is None:
            await self.app(scope, receive, send)
            return
        token = NOW.set(record)
        try:
            await self.app(scope, receive, send)
        finally:
            with contextlib.suppress(Exception):
                NOW.reset(token)
                self._writer.add(record, time.time())

    def _begun(self, scope: Scope) -> Record | None:
        try:
            if scope["type"] != "http" or scope["method"] != "POST":
                return None
            if (client := getattr(scope["app"].state, "engine_client", None)) is None:
                return None
            _wrap(client)
            agent = next((value for name, value in scope["headers"] if name == b"user-agent"), b"")
            return Record(scope["path"], client_of(agent.decode("latin-1")), time.time())
        except Exception as error:
            self._writer.say(f"requests are not logged: {type(error).__name__}: {reason(error)}")
            return None


def _wrap(client: Any) -> None:
    """Make the engine client's `generate` tell the current record what it is given and what comes."""
    inner = client.generate
    if getattr(inner, MARK, False) is True:
        return

    def generate(*args: Any, **named: Any) -> Any:
        outputs = inner(*args, **named)
        call = _called(args, named) if hasattr(outputs, "__aiter__") else None
        return outputs if call is None else Outputs(outputs, call)

    setattr(generate, MARK, True)
    client.generate = generate


class Outputs:
    """An engine's outputs as they come, and whatever else the engine's own iterator has."""

    def __init__(self, outputs: Any, call: Call) -> None:
        self._outputs = self._iterator = outputs
        self._call = call

    def __aiter__(self) -> Outputs:
        self._iterator = self._outputs.__aiter__()
        return self

    async def __anext__(self) -> Any:
        output = await self._iterator.__anext__()
        with contextlib.suppress(Exception):
            self._call.take(output)
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._outputs, name)


def _called(args: tuple[Any, ...], named: dict[str, Any]) -> Call | None:
    try:
        record = NOW.get()
        if record is None:
            return None
        prompt, params, name = (
            args[place] if len(args) > place else named.get(key)
            for place, key in enumerate(("prompt", "sampling_params", "request_id"))
        )
        ids, salt = (
            prompt.get(key) if isinstance(prompt, dict) else getattr(prompt, key, None)
            for key in ("prompt_token_ids", "cache_salt")
        )
        kind = getattr(getattr(params, "output_kind", None), "name", "")
        call = Call(str(name), str(named.get("session_id") or ""), str(salt or ""), kind, list(ids or ()))
        record.calls.append(call)
        return call
    except Exception:
        return None


class Writer:
    """Writes the log in a thread: the server's own loop must not wait for a disk."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or Path(os.environ.get(VARIABLE) or DEFAULT)
        self._records: queue.Queue[tuple[Record, float] | None] = queue.Queue(MOST_WAITING)
        self._thread: threading.Thread | None = None
        self._said = ""

    def add(self, record: Record, ended: float) -> None:
        """Hand a record over. It never blocks."""
        if not record.calls:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvtune-tap", daemon=True)
            self._thread.start()
            atexit.register(self.close)
        try:
            self._records.put_nowait((record, ended))
        except queue.Full:
            self.say("requests are not logged: they come faster than they can be written")

    def say(self, what: str) -> None:
        if what and what != self._said:
            with contextlib.suppress(Exception):
                print(f"kvtune: {what}", file=sys.stderr, flush=True)
        self._said = what

    def close(self) -> None:
        """Write what waits, for a while."""
        if self._thread is not None:
            with contextlib.suppress(queue.Full):
                self._records.put_nowait(None)
            self._thread.join(END_S)

    def _run(self) -> None:
        file: LogFile | None = None
        while (got := self._records.get()) is not None:
            try:
                file = file or LogFile(
                    self.path.with_name(f"{self.path.stem}.{os.getpid()}{self.path.suffix}")
                )
                for line in _rows(*got):
                    file.add(line)
                    self.say(file.news)
            except Exception as error:
                self.say(f"{self.path} cannot be written: {reason(error)}")
            for call in got[0].calls:
                while call.prompt:  # freeing many numbers at once would keep the server's loop waiting
                    del call.prompt[-PIECE:]
                    time.sleep(0)


def _rows(record: Record, ended: float) -> Iterator[dict[str, Any]]:
    yield from (
        line_of(
            Logged(
                call.name,
                call.prompt,
                call.answers.get(0, ()),
                record.began,
                ended,
                call.hit,
                call.salt,
                call.session,
                call.first - record.began if call.first > record.began else None,
                sum(map(len, call.answers.values())),
                record.client,
            ),
            by=BY,
            api=record.path,
            prompt_tokens=len(call.prompt),
            broken_off_by=None if call.finished else "client",
        )
        for call in record.calls
        if call.prompt
    )
