"""The command's end of the analyst: starts it, hands records over, starts it again if it dies. It never blocks.

If the analyst is slow, what waits for it is bounded, and what exceeds that is dropped and counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence

from kvtune import children
from kvtune.tap.exchange import Exchange, Numbers
from kvtune.tap.messages import Ended, Lost, Message, Sent, Settings, framed

MOST_WAITING = 64 << 20
"""Bytes that wait for the analyst."""
AGAIN_S = (1.0, 30.0)
"""Seconds before the first and before later new starts, if the analyst dies."""
TURN = 1 << 20
"""Bytes that are handed over before other connections have their turn."""
END_S = 5.0
"""Seconds that the analyst has to finish when the command ends."""


class Recorder(asyncio.Protocol):
    """A `Sink`. `program`: the analyst's command, which gets the number of its end of the socket as last word."""

    def __init__(
        self,
        settings: Settings,
        numbers: Numbers,
        say: Callable[[str], None],
        program: list[str] | None = None,
    ) -> None:
        self._settings = settings
        self._numbers = numbers
        self._say = say
        self._program = program or children.python("kvtune.tap.analyst")
        self._transport: asyncio.Transport | None = None
        self._waiting: deque[tuple[bytes | bytearray, bool]] = deque()
        """Pieces of messages, each with whether it is its message's last."""
        self._waiting_bytes = 0
        self._paused = False
        self._moving = False
        self._child: children.Child | None = None
        self._dropped = 0
        self._told = 0
        self._wait_s = AGAIN_S[0]
        self._closing = False

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                words = [*self._program, str(theirs.fileno())]
                self._child = children.start(words, pass_fds=[theirs.fileno()])
        except OSError:
            ours.close()
            raise
        ours.setblocking(False)
        transport, _ = await loop.create_connection(lambda: self, sock=ours)
        self._transport = transport
        self._paused = False
        self._wait(self._settings)

    def asked(self, exchange: Exchange) -> None:
        self._tell(
            Sent(
                exchange.number,
                exchange.api,
                exchange.session,
                exchange.ours,
                exchange.client,
                exchange.began,
                time.time(),
                encoding=exchange.encoding,
                cut=exchange.body.cut,
            ),
            () if exchange.body.cut else exchange.body.pieces,
        )

    def answered(self, exchange: Exchange) -> None:
        self._tell(
            Ended(
                exchange.number,
                exchange.status,
                exchange.kind,
                exchange.first,
                exchange.done,
                exchange.ended,
                encoding=exchange.answer_encoding,
                cut=exchange.answer.cut,
            ),
            exchange.answer.pieces,
        )

    def _tell(self, message: Message, content: Sequence[bytes | bytearray] = ()) -> None:
        if self._transport is None or self._waiting_bytes > MOST_WAITING:
            self._dropped += 1
            return
        if self._dropped or self._numbers.unfollowed > self._told:
            lost = Lost(self._dropped, self._numbers.unfollowed - self._told)
            self._dropped, self._told = 0, self._numbers.unfollowed
            self._wait(lost)
        self._wait(message, content)

    def _wait(self, message: Message, content: Sequence[bytes | bytearray] = ()) -> None:
        pieces = framed(message, content)
        self._waiting_bytes += sum(map(len, pieces))
        self._waiting += ((piece, number == len(pieces)) for number, piece in enumerate(pieces, start=1))
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
            moved += self._write()

    def _write(self) -> int:
        piece, _ = self._waiting.popleft()
        self._waiting_bytes -= len(piece)
        if self._transport is not None:
            self._transport.write(piece)
        return len(piece)

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        if not self._moving:
            self._move()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._dropped += sum(last for _, last in self._waiting)
        self._waiting.clear()
        self._waiting_bytes = 0
        if not self._closing:
            self._say(f"the analysis ended; requests pass on, and it starts again in {self._wait_s:.0f} s")
            asyncio.get_running_loop().call_later(self._wait_s, self._again)
            self._wait_s = AGAIN_S[1]

    def _again(self) -> None:
        if self._closing:
            return
        self._reap(0.0)
        self._starting = asyncio.get_running_loop().create_task(self._restart())

    async def _restart(self) -> None:
        try:
            await self.start()
        except OSError as error:  # no descriptors or no memory are left for it
            self.connection_lost(error)

    def _reap(self, wait_s: float) -> None:
        if self._child is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(wait_s)
                return
            self._child.kill()
            self._child.wait()

    def close(self) -> None:
        """Let the analyst finish what it has, for a while."""
        self._closing = True
        while self._waiting and self._transport is not None:
            self._write()
        if self._transport is not None:
            self._transport.close()

    def wait(self) -> None:
        """After the loop has ended: wait for the analyst's end."""
        self._reap(END_S)
