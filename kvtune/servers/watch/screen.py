"""The live view: draws the Document of a snapshot again and again, as high as the terminal, and reads keys."""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
from rich.console import ConsoleDimensions
from rich.live import Live
from rich.text import Text

from kvtune.base.errors import KvtuneError, UsageError
from kvtune.base.files import creating
from kvtune.data.causes import COMMON, cause_meaning, cause_title
from kvtune.data.show.screen import document_lines
from kvtune.data.show.terminal import console, folded, printable
from kvtune.servers.watch.document import SORTS, document
from kvtune.servers.watch.servers import FleetSnapshot
from kvtune.servers.watch.snapshot import Snapshot, down

REFRESH_S = 0.5
KEYS = "q quit   p pause   s sort   w write a snapshot   ? help"
HELP = (
    "hit            prompt tokens that the prefix cache had, as the server counts them",
    "other rows     where the other prompt tokens went; all rows of a column add up to 100 %",
    *(line for cause in COMMON for line in folded(f"  {cause_title(cause):37}  {cause_meaning(cause)}", 110)),
    "prefixes       prompts that begin with the same block; `lost`: seen before, computed again.",
    "               At least: a prompt that stores no whole block makes no event",
    "differs at     the token from which a prompt no longer agrees with an earlier one",
    "",
    "kvtune reads only: it sends the server no load and changes nothing.",
    "KV events carry token ids in clear, without authentication: keep their port to yourself.",
)


def lines(
    shot: Snapshot | FleetSnapshot, width: int, height: int, *, sort: str = "tokens", paused: str = ""
) -> list[str]:
    """Return `height` lines of at most `width` characters. Rows of prefixes and differences fill what is left."""
    room = height - 1
    if isinstance(shot, FleetSnapshot):
        whole = document(shot)
    else:
        for differences in (1, 0):
            spare = room - len(document_lines(document(shot, sort, 1, differences), width))
            if spare >= 0:
                break
        prefixes = max(0, spare * 2 // 3 if shot.divergences and differences else spare)
        whole = document(shot, sort, 1 + prefixes, (1 + spare - prefixes) * differences)
    made = document_lines(whole, width)[:room]
    return [line[:width] for line in (*made, *[""] * (room - len(made)), paused or KEYS)]


class View:
    """The live view, until `q`. `look` returns a snapshot, or raises KvtuneError if the server cannot be reached."""

    def __init__(self, look: Callable[[], Snapshot | FleetSnapshot], folder: Path) -> None:
        self._look = look
        self._folder = folder
        self._sort = 0
        self._paused = False
        self._help = False
        self._said = ""

    def run(self) -> None:
        screen = console()
        shot: Snapshot | FleetSnapshot | None = None
        with keys() as key, Live(console=screen, screen=True, auto_refresh=False) as live:
            due = 0.0
            while True:
                now = time.monotonic()
                if now >= due:
                    due = now + REFRESH_S
                    if not self._paused or shot is None:
                        shot = self._next(shot)
                # The terminal's own size: the variables COLUMNS and LINES do not follow a resize.
                screen.size = ConsoleDimensions(*os.get_terminal_size(screen.file.fileno()))
                if shot is not None or self._said:
                    text = "\n".join(self._lines(shot, screen.width, screen.height))
                    live.update(Text(printable(text), no_wrap=True, overflow="crop"), refresh=True)
                pressed = key(max(0.0, due - time.monotonic()))
                if pressed in ("q", "\x03", "\x1b"):
                    return
                self._press(pressed, shot)

    def _next(self, before: Snapshot | FleetSnapshot | None) -> Snapshot | FleetSnapshot | None:
        try:
            shot = self._look()
        except UsageError:
            raise
        except KvtuneError as error:
            self._said = f"asking again: {error.message}"
            return down(before) if isinstance(before, Snapshot) and before.down_since is None else before
        if self._said.startswith("asking again"):
            self._said = ""
        return shot

    def _lines(self, shot: Snapshot | FleetSnapshot | None, width: int, height: int) -> Sequence[str]:
        if self._help:
            return [*HELP[: height - 1], KEYS][:height]
        status = self._said or (f"paused; p goes on   {KEYS}" if self._paused else "")
        if shot is None:
            return [status[:width]]
        return lines(shot, width, height, sort=tuple(SORTS)[self._sort], paused=status)

    def _press(self, key: str, shot: Snapshot | FleetSnapshot | None) -> None:
        if key:
            self._said = ""
        if key == "p":
            self._paused = not self._paused
        elif key == "s":
            self._sort = (self._sort + 1) % len(SORTS)
        elif key in ("?", "h"):
            self._help = not self._help
        elif key == "w" and shot is not None:
            path = self._folder / time.strftime("kvtune-watch-%Y%m%d-%H%M%S.json")
            try:
                with creating(path, private=True) as file:
                    file.write(json.dumps(msgspec.to_builtins(shot), indent=1).encode() + b"\n")
                self._said = f"wrote {path}"
            except OSError as error:
                self._said = f"cannot write {path}: {error.strerror}"


@contextlib.contextmanager
def keys() -> Iterator[Callable[[float], str]]:
    """Yield a function that waits up to N seconds for a key, and returns it; "" without a key or a terminal."""
    if not sys.stdin.isatty():

        def none(seconds: float) -> str:
            time.sleep(seconds)
            return ""

        yield none
        return
    import termios
    import tty

    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)
    tty.setcbreak(number)

    def key(seconds: float) -> str:
        if not select.select([number], [], [], seconds)[0]:
            return ""
        return os.read(number, 1).decode(errors="replace")

    try:
        yield key
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)
