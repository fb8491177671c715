"""The command's process: listens, relays, and keeps an analyst beside it, until Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import queue
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvtune.base.errors import UsageError
from kvtune.base.files import unwritable
from kvtune.data.run.output import output_folder
from kvtune.servers.tap.exchange import Numbers
from kvtune.servers.tap.messages import Settings
from kvtune.servers.tap.recorder import Recorder
from kvtune.servers.tap.relay import Relay, target_of
from kvtune.servers.watch.client import HEADER_NAME

Say = Callable[[str], None]
LOCAL = "127.0.0.1"
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
MOST_SAID = 100
"""Lines that wait for a terminal that does not read."""


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int

    @property
    def local(self) -> bool:
        """Whether only this machine reaches it."""
        if self.host == "localhost":
            return True
        with contextlib.suppress(ValueError):
            return ipaddress.ip_address(self.host).is_loopback
        return False

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def address(text: str) -> Address:
    """Return where to listen, from PORT (of this machine alone) or ADDRESS:PORT."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if colon else LOCAL
    if not host or not port.isascii() or not port.isdecimal() or not 0 <= int(port[:6]) < 1 << 16:
        raise UsageError(
            f"--listen {text!r} is no address to listen at",
            "give PORT, or ADDRESS:PORT; 0.0.0.0:PORT is reached from everywhere",
        )
    return Address(host, int(port))


def header_name(text: str) -> str:
    """Return a header's name as heads are searched for it. UsageError for what no header is called."""
    if text and not HEADER_NAME.fullmatch(text):
        raise UsageError(
            f"--replica-header {text!r} is no name of a header",
            "give the name alone, for example x-envoy-upstream-host",
        )
    return text.lower()


def log_path(named: Path | None) -> Path:
    """Return the log's path. UsageError if it cannot be made there."""
    path = named or output_folder() / time.strftime("tap-%Y%m%d-%H%M%S.jsonl")
    try:
        if named is None:
            path.parent.mkdir(parents=True, exist_ok=True)
        why = unwritable(path)
        if not path.resolve().parent.is_dir():
            why = "there is no such folder"
    except OSError as error:
        why = error.strerror or str(error)
    if why:
        raise UsageError(f"cannot write the log {path}: {why}", "name another with -o FILE, or --no-log")
    return path


def run(
    settings: Settings, listen: Address, seconds: float, say: Say, *, add_session: bool, replica_header: str
) -> None:
    """Relay for some seconds (0: until Ctrl-C). KvtuneError if it cannot begin.

    `replica_header`: the server is a router, whose answers name theirs in this header; "": it is none.
    """
    target = target_of(settings.base, settings.insecure)
    numbers = Numbers(settings.prefix, add_session, target.host_field, replica_header)
    _more_files()
    with Speaker(say) as speaker:
        recorder = Recorder(settings, numbers, speaker)
        relay = Relay(target, recorder, numbers, speaker)
        try:
            with asyncio.Runner() as runner:
                runner.run(_relayed(relay, recorder, settings, listen, seconds, speaker))
        finally:
            recorder.reap()


@contextlib.contextmanager
def _stopped() -> Iterator[asyncio.Event]:
    """Let signals end the `with` block tidily, and the command after it; a second one cancels what it waits for.

    SIGINT, too, where a script's background job inherits that it is ignored.
    """
    loop, stop, names = asyncio.get_running_loop(), asyncio.Event(), list[str]()
    task = asyncio.current_task()

    def end(number: signal.Signals) -> None:
        if names and task is not None:
            task.cancel()
        names.append(number.name)
        stop.set()

    before = {number: signal.getsignal(number) for number in STOPS}
    heard = {n: was for n, was in before.items() if was is not signal.SIG_IGN or n == signal.SIGINT}
    for number in heard:
        loop.add_signal_handler(number, end, number)
    try:
        yield stop
    finally:
        for number, handler in heard.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)
        if names:
            raise KeyboardInterrupt(*(name for name in names[:1] if name != "SIGINT"))


async def _relayed(
    relay: Relay, recorder: Recorder, settings: Settings, listen: Address, seconds: float, say: Say
) -> None:
    gc.collect()
    gc.freeze()  # what the command line imported: a full collection would stop the relay for it
    with _stopped() as stop:
        server = await relay.listen(listen.host, listen.port)
        try:
            await recorder.start()
            address = Address(listen.host, server.sockets[0].getsockname()[1])
            name = relay.target.name
            say(f"http://{address} relays to {name}: let clients use it as their base URL; Ctrl-C ends it")
            if not address.local:
                say(f"{address} is reached from other machines: whoever reaches it can use the server")
            if settings.log:
                ids = "token ids, which are text to who has the tokenizer"
                what = "text and token ids" if settings.with_text else ids
                say(f"log: {settings.log} ({what}; yours alone to read)")
            await relay.knock()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), seconds or None)
        finally:
            server.close()
            relay.cut()
            for _ in range(2):
                await asyncio.sleep(0)  # the cut connections' exchanges end
            await recorder.finish()


def _more_files() -> None:
    """Allow as many open connections as this user may have: each takes two descriptors."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Speaker:
    """Says lines in a thread: a terminal that does not read must not stop the relay. Lines beyond some are dropped."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._lines: queue.Queue[str | None] = queue.Queue(MOST_SAID)
        self._thread = threading.Thread(target=self._run, name="kvtune-says", daemon=True)

    def __call__(self, line: str) -> None:
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(line)

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            with contextlib.suppress(OSError, ValueError):
                self._say(line)

    def __enter__(self) -> Speaker:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(None)
        self._thread.join(1.0)
