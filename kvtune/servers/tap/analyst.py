"""The analyst's process: takes what the relay recorded, renders, judges, writes the log and prints a line a request.

`python -m kvtune.servers.tap.analyst N`: N is the number of the socket. It ends when the relay's end of the socket
closes. Whatever is wrong here is a line on the screen: the relay does not wait for it.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import socket
import sys
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from kvtune.base.bounded import BeyondError, decode_measured, unpack
from kvtune.base.dialogue import Frames, framed
from kvtune.base.errors import KvtuneError, reason
from kvtune.base.masking import Secrets, holding
from kvtune.data.show.terminal import one_line, print_json, screened
from kvtune.requests.log.logged import Logged, line_of, short
from kvtune.requests.log.requests_log import refused
from kvtune.servers.tap.answers import EVENTS, LIMITS, read_answer
from kvtune.servers.tap.judging import Judging, Request
from kvtune.servers.tap.limits import Latest, Remembered, limit_memory
from kvtune.servers.tap.lines import as_json, as_text, in_blocks
from kvtune.servers.tap.log import BY, LogFile
from kvtune.servers.tap.messages import Begun, Ended, Message, Outcome, Sent, Settings
from kvtune.servers.tap.rendering import Rendering

PIECE = 1 << 20
NICE = 15
"""The server's process, which may share the cores, comes first: a line may wait, a token may not."""
POLL_S = 0.05
MOST_SHOWN = 200
"""Requests that can be shown in blocks."""
MOST_TYPED = 100
MOST_OPEN = 10_000
"""Requests that wait for their answer. Beyond that the earliest is forgotten."""
GOOD = 200
NO_HITS = (
    "the server does not report this request's hit: start it with --enable-prompt-tokens-details (and "
    "--enable-force-include-usage for streams), or with --kv-events-config"
)
OTHER_STATUS = "answered with another status than 200"


@dataclass(slots=True)
class Pending:
    sent: Sent
    body: Mapping[str, Any]
    requests: list[Request]
    why: str = ""
    """Why its token ids are not known."""
    trouble: str = ""
    """Why it is not analysed, though it could be read."""


class Analyst:
    def __init__(self, settings: Settings, relay: socket.socket | None = None) -> None:
        self.settings = settings
        self.rendering = Rendering(settings)
        self._said = ""
        self._hinted = False
        self.judging = Judging(settings, self._trouble)
        self.log = LogFile(Path(settings.log), refused) if settings.log else None
        self._relay = relay
        """Where outcomes are told."""
        self._open: OrderedDict[int, Pending] = OrderedDict()
        self._ending: deque[tuple[float, int, Callable[[], None]]] = deque()
        """When, by time.monotonic(), all that the events say of an answered request has come; its number, its end."""
        self._shown = Latest[str, Request](MOST_SHOWN)
        self.remembered = Remembered(self._forget)
        if self.log is not None:
            try:
                self.log.open()
            except OSError as error:
                self._trouble(f"no log is written: {settings.log}: {reason(error)}")

    def take(self, message: Message) -> None:
        if isinstance(message, Sent):
            self._guarded(partial(self._sent, message), message.number)
        elif isinstance(message, Begun):
            self._guarded(partial(self._begun, message))
        elif isinstance(message, Ended):
            self._guarded(partial(self._ended, message), message.number)

    def _forget(self, number: int) -> None:
        """Forget the text of a request, wherever it is remembered."""
        for label in [label for label, request in self._shown.items() if request.number == number]:
            del self._shown[label]
        self.judging.forget(number)
        pending = self._open.get(number)
        if pending is not None:
            self.judging.dropped(pending.requests, computed=True)
            pending.body, pending.requests = {}, []
            pending.why = pending.trouble = "later requests took its place in memory before it was answered"

    def _sent(self, sent: Sent) -> None:
        if sent.lost:
            self.judging.missed()
        pending = Pending(msgspec.structs.replace(sent, content=b""), {}, [])
        self._open[sent.number] = pending
        while len(self._open) > MOST_OPEN:
            _, forgotten = self._open.popitem(last=False)
            self.judging.dropped(forgotten.requests, computed=True)
            self._tell(forgotten.sent.number, f"{MOST_OPEN:,} later requests came before its answer")
        self._read(sent, pending)

    def _read(self, sent: Sent, pending: Pending) -> None:
        if sent.cut:
            pending.why = "its body was too large to keep, or broken off"
            return
        try:
            content = unpack(sent.content, sent.encoding, LIMITS.text_bytes)
            body, size = decode_measured(content, LIMITS)
        except BeyondError as error:
            pending.why = pending.trouble = f"of its body: {error}"
            return
        except ValueError:
            body, size = None, 0
        if not isinstance(body, dict):
            pending.why = "its body is no JSON object"
            return
        pending.body = body
        self.remembered.add(sent.number, size)
        try:
            prompts = [array("I", ids) for ids in self.rendering.prompts(sent.api, body)]
        except KvtuneError as error:
            pending.why = error.message
            return
        except (OverflowError, TypeError):
            pending.why = "its prompt has numbers that are no token ids"
            return
        pending.requests = [
            self._request(sent, body, ids, number, len(prompts)) for number, ids in enumerate(prompts)
        ]
        for request in pending.requests:
            self.judging.opened(request)

    def _request(
        self, sent: Sent, body: Mapping[str, Any], ids: Sequence[int], number: int, count: int
    ) -> Request:
        name = f"{self.settings.prefix}{sent.number}" + (f"-{number}" if count > 1 else "")
        salt, session = body.get("cache_salt"), body.get("session_id")  # vLLM takes it before the header's
        row = Logged(
            name,
            ids,
            t0=sent.began,
            salt=salt if isinstance(salt, str) else "",
            session=session if isinstance(session, str) and session else sent.session,
            output_tokens=-1,
            kind=sent.client,
        )
        return Request(sent.number, sent.api, body, row, part=number + 1 if count > 1 else 0)

    def _begun(self, begun: Begun) -> None:
        pending = self._open.get(begun.number)
        for request in pending.requests if pending is not None else ():
            self.judging.begun(request)

    def _ended(self, ended: Ended) -> None:
        pending = self._open.pop(ended.number, None)
        if pending is None:
            return
        n = pending.body.get("n")
        answer = read_answer(ended.content, ended.kind, ended.encoding, n if type(n) is int and n > 0 else 1)
        good = ended.status == GOOD
        exact = good and len(answer.prompts) == max(1, len(pending.requests))
        if exact and not pending.requests and pending.body:
            pending.requests = [self._request(pending.sent, pending.body, list(answer.prompts[0]), 0, 1)]
            pending.why = ""
            self.judging.opened(pending.requests[0])
        # A server refuses a request before it computes anything; one that left or failed may have begun.
        computed = good or not 400 <= ended.status < 500
        begun = good and (ended.how == "whole" or ended.first > 0)
        if not begun:
            self.judging.dropped(pending.requests, computed=computed)
        elif not pending.requests:
            self.judging.missed()
        shown = pending.requests or [self._request(pending.sent, pending.body, [], 0, 1)]
        for number, request in enumerate(shown):
            streamed_s = ended.first - pending.sent.began if ended.kind.lower().startswith(EVENTS) else 0.0
            request.row = replace(request.row, t1=ended.done, ttft=streamed_s if streamed_s > 0 else None)
            if exact:
                request.row = replace(request.row, prompt=array("I", answer.prompts[number]))
            request.trouble = request.trouble or pending.trouble
            if len(shown) == 1:
                request.reported, tokens = answer.prompt_tokens, answer.output_tokens
                request.row = replace(request.row, answer=answer.answer, hit=answer.hit, output_tokens=tokens)
                if pending.requests and 0 <= request.reported != len(request.row.prompt):
                    counts = (
                        f"{len(request.row.prompt):,} tokens, and the server counted {request.reported:,}"
                    )
                    pending.why = f"it was rendered to {counts}"
                    self.judging.missed()
            if begun and pending.requests and pending.why:
                self.judging.dropped([request], computed=True)
            elif begun and pending.requests:
                self.judging.ended(request)
        late_s = self.judging.late_s if good else 0.0
        finish = partial(self._finish, pending, shown, ended, answer.error)
        self._ending.append((time.monotonic() + late_s, ended.number, finish))

    def finish(self, until: float = math.inf) -> None:
        """Judge, log and show the requests whose end is due."""
        while self._ending and self._ending[0][0] <= until:
            _, number, finish = self._ending.popleft()
            self._guarded(finish, number)

    def _finish(self, pending: Pending, requests: Sequence[Request], ended: Ended, error: str) -> None:
        good, replica = ended.status == GOOD, short(one_line(ended.replica))
        for request in requests:
            if good and pending.requests:
                self.judging.closed(request)
            request.row = replace(request.row, replica=replica)
            request.status, request.how, request.error = ended.status, ended.how, error
            request.why = pending.why if good else ""
            if request.why:
                request.tally = request.tally and msgspec.structs.replace(request.tally, misses={})
            elif good:
                request.unwritten = self._unwritten(request)
                request.logged = self.log is not None and not request.unwritten
            if good and request.tally is None and not self.judging.late_s and not self._hinted:
                print(f"kvtune: {NO_HITS}", file=sys.stderr, flush=True)
                self._hinted = True
            self._show(request)
        whys = (request.why or request.unwritten for request in requests)
        self._tell(ended.number, next(filter(None, whys), "" if good else OTHER_STATUS))

    def _tell(self, number: int, why: str) -> None:
        """Tell the relay what became of a request. `why`: why it is not recorded; "": it is."""
        if self._relay is not None:
            with contextlib.suppress(OSError):  # a relay that is gone is seen where messages are taken
                self._relay.sendall(b"".join(framed(Outcome(number, why))))

    def _unwritten(self, request: Request) -> str:
        """Write a request to the log, if there is one. Return why it is not in it."""
        if self.log is None:
            return ""
        line = line_of(
            request.row if request.tally is None else replace(request.row, hit=request.tally.hit_tokens),
            by=BY,
            api=request.api,
            prompt_tokens=request.reported,
            hit_by=request.by if request.by == "events" else None,
            broken_off_by=request.how if request.how != "whole" else None,
            body=request.body if self.settings.with_text else None,
        )
        self.log.add(line)
        self._trouble(self.log.news)
        return self.log.why

    def _show(self, request: Request) -> None:
        self._shown[request.label] = request
        if self.settings.json:
            print_json(as_json(request, self.settings.with_text))
        else:
            for line in as_text(request):
                print(one_line(line), flush=True)

    def _trouble(self, what: str) -> None:
        """Say what is wrong on standard error, once until it is something else."""
        if what and what != self._said:
            print(f"kvtune: {one_line(what)}", file=sys.stderr, flush=True)
        self._said = what

    def _asked_for(self, typed: str) -> None:
        """Show the request whose number was typed, in blocks."""
        label = f"#{typed.strip().removeprefix('#')}"
        shown = [request for name, request in self._shown.items() if label in (name, name.partition(".")[0])]
        for line in (line for request in shown for line in in_blocks(request)):
            print(one_line(line), flush=True)
        if not shown and label != "#":
            print("no such request: type the number of one of the last 200", file=sys.stderr, flush=True)

    def run(self, relay: socket.socket, frames: Frames[Message]) -> None:
        """Take messages until the relay's end closes, and numbers of requests that are typed at a terminal."""
        self._relay = relay
        typed = [sys.stdin] if not self.settings.json and sys.stdin.isatty() and sys.stdout.isatty() else []
        sockets = [relay]
        while sockets or self._ending:
            # Rendering takes time: what is due later may have events that come meanwhile.
            taken = time.monotonic()
            batches = self.judging.take()
            ready, _, _ = select.select([*sockets, *typed], [], [], POLL_S)
            if typed and typed[0] in ready:
                line = ""
                with contextlib.suppress(OSError):  # of a terminal that is another process's now
                    line = typed[0].readline(MOST_TYPED)
                self._guarded(partial(self._asked_for, line))
                typed = typed if line else []
            while relay in ready:
                data = relay.recv(PIECE)
                if not data:
                    sockets = []
                    break
                for message in frames.feed(data):
                    self.take(message)
                ready, _, _ = select.select([relay], [], [], 0)
            self._guarded(partial(self.judging.add, batches))
            self.finish(taken)

    def _guarded(self, work: Callable[[], None], number: int = 0) -> None:
        """Do a part of the work; whatever goes wrong with one request ends the analysis of that request only."""
        try:
            work()
        except BrokenPipeError:
            raise
        except MemoryError:
            self.remembered.clear()
            self._failed(number, "no memory was left, and earlier requests are forgotten")
        except Exception as error:
            self._failed(number, f"{type(error).__name__}: {reason(error)}")

    def _failed(self, number: int, why: str) -> None:
        self._trouble(f"{f'request #{number}' if number else 'a request'} was not analysed: {why}")
        if number:
            self._tell(number, "its analysis failed")

    def close(self) -> None:
        self.judging.close()
        self.rendering.close()


def main() -> int:
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGTTIN):
        signal.signal(number, signal.SIG_IGN)  # the command's end is seen on the socket
    limit_memory()
    with socket.socket(fileno=int(sys.argv[1])) as relay, contextlib.suppress(BrokenPipeError):
        frames = Frames[Message](Message)
        first: list[Any] = []
        while not first:
            data = relay.recv(PIECE)
            if not data:
                return 0
            first = list(frames.feed(data))
        with holding(Secrets(first[0].secrets)), screened():
            analyst = Analyst(first[0], relay)
            os.nice(NICE)  # now that it is built: on a busy machine that would take minutes
            try:
                for message in first[1:]:
                    analyst.take(message)
                analyst.run(relay, frames)
            finally:
                analyst.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
