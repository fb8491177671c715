"""Writes a snapshot as lines that fit a terminal; the live view draws them and reads keys."""

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

from kvtune.causes import COMMON, cause_meaning, cause_title
from kvtune.errors import KvtuneError, UsageError
from kvtune.files import creating
from kvtune.terminal import Column, FittedTable, folded, one_line, printable
from kvtune.units import count, ms, percent
from kvtune.watch.watching import SPANS, DifferenceText, Period, Snapshot, Times, down

REFRESH_S = 0.5
SORTS = ("tokens", "lost", "visits")
KEYS = "q quit   p pause   s sort   w write a snapshot   ? help"
HELP_WIDTH = 110
HELP = (
    "hit            prompt tokens that the prefix cache had, as the server counts them",
    "other rows     where the other prompt tokens went; all rows of a column add up to 100 %",
    *(
        line
        for cause in COMMON
        for line in folded(f"  {cause_title(cause):37}  {cause_meaning(cause)}", HELP_WIDTH)
    ),
    "prefixes       prompts that begin with the same block; `lost`: seen before, computed again.",
    "               At least: a prompt that stores no whole block makes no event",
    "differs at     the token from which a prompt no longer agrees with an earlier one",
    "",
    "kvtune reads only: it sends the server no load and changes nothing.",
    "KV events carry token ids in clear, without authentication: keep their port to yourself.",
)
DASH = "–"


def lines(
    snapshot: Snapshot, width: int, height: int, *, sort: str = "tokens", paused: str = ""
) -> list[str]:
    """Return `height` lines of at most `width` characters. Rows of prefixes fill the lines that are left."""
    top = _head(snapshot, width)
    top += _hits(snapshot, width)
    bottom = [paused or KEYS[:width]]
    room = height - len(top) - len(bottom)
    for note in snapshot.notes:
        cut = (
            folded(f"note: {one_line(note)}", width)
            if not snapshot.prefixes
            else [one_line(f"note: {note}")[:width]]
        )
        if len(cut) + 1 <= room:
            top += cut
            room -= len(cut)
    top += _lists(snapshot, width, room, sort)
    top = top[: height - len(bottom)]
    blank = [""] * (height - len(top) - len(bottom))
    return [line[:width] for line in [*top, *blank, *bottom]]


def page(snapshot: Snapshot, width: int) -> list[str]:
    """Return all lines of a snapshot, for `--once`: long notes are folded, not cut."""
    made = [*_head(snapshot, width), *_hits(snapshot, width), *_lists(snapshot, width, 30, "tokens")]
    for note in snapshot.notes:
        made += folded(f"note: {one_line(note)}", width)
    return made


def _head(shot: Snapshot, width: int) -> list[str]:
    server = f"vLLM {shot.vllm}" if shot.vllm else "vLLM"
    engines = f", {shot.engines} engines" if shot.engines > 1 else ""
    restarted = f", started anew {shot.restarts} x: all below is since then" if shot.restarts else ""
    if shot.down_since is not None:
        restarted = f"   DOWN since {time.strftime('%H:%M:%S', time.localtime(shot.down_since))}"
    pool = percent(shot.pool_use) if shot.pool_use is not None else DASH
    blocks = f" of {count(shot.pool_blocks)} blocks of {shot.block_size}" if shot.pool_blocks else ""
    why = ", ".join(f"{name} {n}" for name, n in sorted(shot.waiting_by_reason.items()))
    waiting = _number(shot.waiting) + (f" ({why})" if why else "")
    return [
        one_line(f"{shot.url}   {shot.model}   {server}{engines}{restarted}")[:width],
        f"running {_number(shot.running)}   waiting {waiting}   preempted {_number(shot.preemptions)}   "
        f"pool {pool}{blocks}",
        f"prompt {_rate(shot.prompt_tokens_s)} tokens/s   output {_rate(shot.output_tokens_s)} tokens/s",
        f"first token {_pair(shot.first_token)}   between tokens {_pair(shot.between_tokens)}",
        "",
    ]


def _hits(shot: Snapshot, width: int) -> list[str]:
    periods = _periods(shot)
    causes: dict[str, int] = {}
    for _, period in periods:
        for cause, tokens in (period.misses or {}).items():
            causes[cause] = causes.get(cause, 0) + tokens
    ordered = sorted(causes, key=lambda cause: -(periods[-1][1].misses or {}).get(cause, 0))
    rows = [("prompt tokens", *(count(period.query_tokens) for _, period in periods))]
    rows.append(("hit", *(_share(period, period.hit_tokens) for _, period in periods)))
    if any(period.loaded_tokens for _, period in periods):
        rows.append(("  loaded by a connector", *(_share(p, p.loaded_tokens) for _, p in periods)))
    if causes:
        rows += [
            (cause_title(c), *(_share(p, (p.misses or {}).get(c, 0)) for _, p in periods)) for c in ordered
        ]
    else:
        rows.append(("missed", *(_share(p, p.query_tokens - p.hit_tokens) for _, p in periods)))
    columns = [Column("prefix cache", folds=True, least=20)]
    columns += [Column(name, rank=(1, 2, 0)[-len(periods) :][at]) for at, (name, _) in enumerate(periods)]
    made = FittedTable(columns, rows).lines(width)
    if shot.evicted_blocks_s is not None:
        age = (
            f", stored {ms(1000 * shot.evicted_age_s)} before (median)"
            if shot.evicted_age_s is not None
            else ""
        )
        held = f"; {count(shot.cached_blocks)} blocks cached" if shot.cached_blocks is not None else ""
        made.append(f"evicted {shot.evicted_blocks_s:,.1f} blocks/s{age}{held}"[:width])
    return made


def _periods(shot: Snapshot) -> list[tuple[str, Period]]:
    """Return the periods by what they really span: a server may not have been watched for 10 s or 5 min yet."""
    named: dict[str, Period] = {}
    for name, period in shot.periods.items():
        short = period.seconds < 0.9 * SPANS.get(name, 0.0)
        named.setdefault(f"{period.seconds:.0f} s" if short else name, period)
    return list(named.items())


def _lists(shot: Snapshot, width: int, room: int, sort: str) -> list[str]:
    made: list[str] = []
    prefixes = sorted(
        shot.prefixes,
        key=lambda row: {"lost": -row.lost_tokens, "visits": -row.visits}.get(
            sort, -(row.hit_tokens + row.lost_tokens)
        ),
    )
    points = shot.divergences
    if prefixes and room >= 3:
        few = max(1, (room - 2) * 2 // 3 - 1) if points else room - 2
        text = any(shot.texts.values())
        columns = [
            Column(f"prefixes by {sort}"),
            Column("visits, at least"),
            Column("hit"),
            Column("lost"),
            Column("longest"),
        ]
        columns += [Column("text", right=False, rank=1, folds=True)] if text else []
        rows = [
            (
                row.first,
                count(row.visits),
                count(row.hit_tokens),
                count(row.lost_tokens),
                count(row.longest_tokens),
                *([" ".join(shot.texts.get(row.first, "").split())[:40]] if text else []),
            )
            for row in prefixes[:few]
        ]
        made += ["", *FittedTable(columns, rows).lines(width)][:room]
    if points and room - len(made) >= 3:
        rows = [
            (f"{count(row.position)}", count(row.times), count(row.new_tokens), row.first)
            for row in points[: room - len(made) - 2]
        ]
        columns = [Column("differs at token"), Column("times"), Column("new tokens"), Column("prefix")]
        if any(one.earlier or one.later for one in shot.differences):
            columns.append(Column("text", right=False, folds=True))
            rows = [(*row, _change(one)) for row, one in zip(rows, shot.differences, strict=False)]
        made += ["", *FittedTable(columns, rows).lines(width)]
    return made


def _change(one: DifferenceText) -> str:
    before, earlier, later = (" ".join(text.split()) for text in (one.before, one.earlier, one.later))
    return f"{before[-20:]} «{earlier[:20]}» «{later[:20]}»"


def _share(period: Period, tokens: int) -> str:
    return percent(tokens, period.query_tokens) if period.query_tokens else DASH


def _number(value: int | None) -> str:
    return DASH if value is None else count(value)


def _rate(value: float | None) -> str:
    return DASH if value is None else count(value)


def _pair(times: Times) -> str:
    if times.median_ms is None:
        return DASH
    return f"{ms(times.median_ms)} (99 %: {ms(times.p99_ms or times.median_ms)})"


class View:
    """The live view, until `q`. `look` returns a snapshot, or raises KvtuneError if the server cannot be reached."""

    def __init__(self, look: Callable[[], Snapshot], folder: Path) -> None:
        self._look = look
        self._folder = folder
        self._sort = 0
        self._paused = False
        self._help = False
        self._said = ""

    def run(self) -> None:
        from rich.console import ConsoleDimensions
        from rich.live import Live
        from rich.text import Text

        from kvtune.terminal import console

        screen = console()
        shot: Snapshot | None = None
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

    def _next(self, before: Snapshot | None) -> Snapshot | None:
        try:
            shot = self._look()
        except UsageError:
            raise
        except KvtuneError as error:
            self._said = f"asking again: {error.message}"
            return down(before) if before is not None and before.down_since is None else before
        if self._said.startswith("asking again"):
            self._said = ""
        return shot

    def _lines(self, shot: Snapshot | None, width: int, height: int) -> Sequence[str]:
        if self._help:
            return [*HELP[: height - 1], KEYS][:height]
        said = self._said or (f"paused; p goes on   {KEYS}" if self._paused else "")
        if shot is None:
            return [said[:width]]
        return lines(shot, width, height, sort=SORTS[self._sort], paused=said)

    def _press(self, key: str, shot: Snapshot | None) -> None:
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
