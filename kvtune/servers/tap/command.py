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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex

from kvtune.base.errors import UsageError
from kvtune.base.files import unwritable
from kvtune.base.masking import held
from kvtune.data.run.output import output_folder
from kvtune.servers.tap.exchange import Numbers
from kvtune.servers.tap.messages import Settings
from kvtune.servers.tap.recorder import Recorder
from kvtune.servers.tap.relay import Relay, target_of
from kvtune.servers.watch.client import HEADER_NAME, base_of

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


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line asks for. `log` None: no log."""

    url: str
    listen: Address
    log: Path | None
    headers: Mapping[str, str]
    insecure: bool = False
    with_text: bool = False
    add_session: bool = True
    json: bool = False
    tokenizer: str = ""
    events: tuple[str, ...] = ()
    """Addresses of KV events that may be opened besides those of the server's own host."""
    replica_header: str = ""
    """`url` is a router, whose answers name their server in this header; "": it is a server."""
    seconds: float = 0.0
    """How long to relay; 0: until Ctrl-C."""


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


def run(asked: Asked, say: Say) -> None:
    """Relay until Ctrl-C, or as long as asked. KvtuneError if it cannot begin."""
    base = base_of(asked.url)
    target = target_of(base, asked.insecure)
    prefix = f"kvtune-{token_hex(2)}-"
    numbers = Numbers(prefix, asked.add_session, target.host_field, asked.replica_header)
    settings = Settings(
        base,
        dict(asked.headers),
        asked.insecure,
        prefix,
        str(asked.log) if asked.log is not None else "",
        asked.with_text,
        asked.json,
        asked.tokenizer,
        list(asked.events),
        held().values,
        bool(asked.replica_header),
    )
    _more_files()
    with Speaker(say) as speaker:
        recorder = Recorder(settings, numbers, speaker)
        relay = Relay(target, recorder, numbers, speaker)
        try:
            with asyncio.Runner() as runner:
                runner.run(_relayed(relay, recorder, asked, speaker))
        finally:
            recorder.wait()


@contextlib.contextmanager
def _stopped() -> Iterator[asyncio.Event]:
    """Let signals end the `with` block tidily, and the command after it; a second one cancels what it waits for."""
    loop, stop, names = asyncio.get_running_loop(), asyncio.Event(), list[str]()
    task = asyncio.current_task()

    def end(number: signal.Signals) -> None:
        if names and task is not None:
            task.cancel()
        names.append(number.name)
        stop.set()

    before = {number: signal.getsignal(number) for number in STOPS}
    heard = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
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


async def _relayed(relay: Relay, recorder: Recorder, asked: Asked, say: Say) -> None:
    gc.collect()
    gc.freeze()  # what the command line imported: a full collection would stop the relay for it
    with _stopped() as stop:
        await _until(stop, relay, recorder, asked, say)


async def _until(stop: asyncio.Event, relay: Relay, recorder: Recorder, asked: Asked, say: Say) -> None:
    server = await relay.listen(asked.listen.host, asked.listen.port)
    try:
        await recorder.start()
        port = server.sockets[0].getsockname()[1]
        address = Address(asked.listen.host, port)
        say(
            f"http://{address} relays to {relay.target.name}: let clients use it as their base URL; Ctrl-C ends it"
        )
        if not address.local:
            say(f"{address} is reached from other machines: whoever reaches it can use the server")
        if asked.log is not None:
            what = (
                "text and token ids"
                if asked.with_text
                else "token ids, which are text to who has the tokenizer"
            )
            say(f"log: {asked.log} ({what}; yours alone to read)")
        await relay.knock()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), asked.seconds or None)
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
