"""The command's end of the analyst: starts it, hands records over, starts it again if it dies. It never blocks.

If the analyst is slow, what waits for it is bounded, and what exceeds that is dropped and counted. The analyst answers
what became of each request: what has no answer at the end is not recorded, and the last line says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import psutil

from kvtune.base import children
from kvtune.base.commands import command
from kvtune.base.dialogue import Frames, framed
from kvtune.data.show.terminal import one_line
from kvtune.servers.tap.exchange import Exchange, Numbers
from kvtune.servers.tap.messages import Begun, Message, Outcome, Settings

MOST_WAITING = 64 << 20
"""Bytes that wait for the analyst."""
AGAIN_S = (1.0, 30.0)
"""Seconds before the first and before later new starts, if the analyst dies."""
TURN = 1 << 20
"""Bytes that are handed over before other connections have their turn."""
TURN_S = 0.25
"""Seconds between two looks at an analyst that finishes."""
END_S, LAST_S = 5.0, 25.0
"""When the command ends, the analyst has this CPU time to finish, and this time by the clock: on a busy machine it
gets little CPU, and a supervisor kills after 30 s."""
SLOW, GONE, LATE = "the analysis was slow", "the analysis had ended", "not analysed when the command ended"
OTHER = "lost by a fault of kvtune"


@dataclass(eq=False)
class Recorder(asyncio.Protocol):
    """A `Sink`. `program`: the analyst's command, which gets the number of its end of the socket as last word."""

    settings: Settings
    numbers: Numbers
    say: Callable[[str], None]
    program: list[str] = field(default_factory=lambda: children.python("kvtune.servers.tap.analyst"))
    _transport: asyncio.Transport | None = None
    _waiting: deque[bytes | bytearray] = field(default_factory=deque)
    """Pieces of messages."""
    _waiting_bytes: int = 0
    _paused: bool = False
    _moving: bool = False
    _child: children.Child | None = None
    _frames: Frames[Message] = field(default_factory=lambda: Frames[Message](Message))
    _unanswered: set[int] = field(default_factory=set)
    """Requests that the analyst was told of, and whose outcome it has not told."""
    _logged: int = 0
    _lost: Counter[str] = field(default_factory=Counter)
    """Requests that are not in the log, by the reason."""
    _dropping: bool = False
    _unfollowed: int = 0
    _wait_s: float = AGAIN_S[0]
    _closing: asyncio.Future[None] | None = None
    """Done when the analyst has ended; None: the command does not end yet."""

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                words = [*self.program, str(theirs.fileno())]
                self._child = children.start(words, pass_fds=[theirs.fileno()])
        except OSError:
            ours.close()
            raise
        ours.setblocking(False)
        transport, _ = await loop.create_connection(lambda: self, sock=ours)
        self._transport = transport
        self._paused = False
        self._frames = Frames[Message](Message)
        self._wait(self.settings)

    def asked(self, exchange: Exchange) -> None:
        body, lost = exchange.body, self._lost[SLOW] > 0
        sent = msgspec.structs.replace(exchange.sent, cut=body.cut, lost=lost)
        if self._tell(sent, () if body.cut else body.pieces):
            self._unanswered.add(sent.number)

    def begun(self, exchange: Exchange) -> None:
        if exchange.sent.number in self._unanswered and self._waiting_bytes <= MOST_WAITING:
            self._wait(Begun(exchange.sent.number))

    def answered(self, exchange: Exchange) -> None:
        ended = exchange.ended
        if ended.number in self._unanswered and not self._tell(ended, exchange.answer.pieces):
            self._unanswered.discard(ended.number)

    def _tell(self, message: Message, content: Sequence[bytes | bytearray] = ()) -> bool:
        """Hand a message about a request over. If it cannot, the request is not recorded."""
        if self.numbers.unfollowed > self._unfollowed:
            self._unfollowed = self.numbers.unfollowed
            self.say(f"{self._unfollowed} connections are relayed and not recorded: no readable HTTP/1.1")
        if self._transport is None or self._waiting_bytes > MOST_WAITING:
            self._lost[GONE if self._transport is None else SLOW] += 1
            if self._transport is not None and not self._dropping:
                self.say("the analysis is slow: requests are not recorded until it has caught up")
                self._dropping = True
            return False
        if self._dropping:
            self.say(f"the analysis has caught up: {self._lost[SLOW]} requests are not recorded")
            self._dropping = False
        self._wait(message, content)
        return True

    def _wait(self, message: Message, content: Sequence[bytes | bytearray] = ()) -> None:
        pieces = framed(message, content)
        self._waiting_bytes += sum(map(len, pieces))
        self._waiting += pieces
        if not self._moving:
            self._move()

    def _move(self) -> None:
        """Hand pieces over until the socket takes no more, with turns for other connections."""
        self._moving = False
        moved = 0
        while self._waiting and self._transport is not None and not self._paused:
            if moved >= TURN:
                self._moving = True
                asyncio.get_running_loop().call_soon(self._move)
                return
            piece = self._waiting.popleft()
            self._waiting_bytes -= len(piece)
            moved += len(piece)
            self._transport.write(piece)
        if self._closing is not None and not self._waiting and self._transport is not None:
            self._transport.write_eof()

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        if not self._moving:
            self._move()

    def data_received(self, data: bytes) -> None:
        for message in self._frames.feed(data):
            if isinstance(message, Outcome) and message.number in self._unanswered:
                self._unanswered.discard(message.number)
                self._logged += not message.why
                self._lost.update(filter(None, [message.why]))

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._waiting.clear()
        self._waiting_bytes = 0
        if self._closing is not None:
            if not self._closing.done():
                self._closing.set_result(None)
            return
        self._lost.update(GONE for _ in self._unanswered)
        self._unanswered.clear()
        self.say(f"the analysis ended; requests pass on, and it starts again in {self._wait_s:.0f} s")
        self._starting = asyncio.get_running_loop().create_task(self._restart(self._wait_s))
        self._wait_s = AGAIN_S[1]

    async def _restart(self, wait_s: float = 0.0) -> None:
        await asyncio.sleep(wait_s)
        if self._closing is not None:
            return
        self.reap(0.0)
        try:
            await self.start()
        except OSError as error:  # no descriptors or no memory are left for it
            self.connection_lost(error)

    def reap(self, wait_s: float = 0.5) -> None:
        """Wait for the analyst's end, and kill it if it does not come."""
        if self._child is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(wait_s)
                return
            self._child.kill()
            self._child.wait()

    async def finish(self) -> None:
        """Let the analyst judge and write what it was told, for a while; say what became of all requests."""
        self._closing = asyncio.get_running_loop().create_future()
        if self._transport is not None:
            self._move()
            await self._last_turns(self._closing)
        if self._transport is not None:
            self._transport.abort()
        for line in self.account():
            self.say(line)

    async def _last_turns(self, closing: asyncio.Future[None]) -> None:
        """Wait for the analyst's end: its CPU time counts, because others may have the cores."""
        started, used_s = time.monotonic(), self._cpu_s()
        while not closing.done() and self._cpu_s() - used_s < END_S and time.monotonic() - started < LAST_S:
            await asyncio.wait([closing], timeout=TURN_S)

    def _cpu_s(self) -> float:
        """CPU time of the analyst. Without one, or where the system does not tell: the clock."""
        with contextlib.suppress(psutil.Error):
            if self._child is not None:
                times = psutil.Process(self._child.pid).cpu_times()
                return float(times.user + times.system)
        return time.monotonic()

    def account(self) -> list[str]:
        """Say how many requests there were, how many are in the log, and why the others are not."""
        total, lost = self.numbers.last, Counter(self._lost)
        if not total:
            return []
        lost[LATE] += len(self._unanswered)
        lost[OTHER] += total - self._logged - lost.total()
        path = self.settings.log
        whys = [f"{count} {why}" for why, count in lost.most_common() if count > 0]
        what = f"{total} requests, {self._logged} {f'in the log {path}' if path else 'analysed'}"
        left = (
            f", {total - self._logged} not {'in it' if path else 'analysed'} ({'; '.join(whys)})"
            if whys
            else ""
        )
        more = [f"  next: {command('explain-log', path)}"] if path and self._logged else []
        return [one_line(f"{what}{left}"), *map(one_line, more)]
