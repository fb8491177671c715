"""What `kvtune` alone prints: where to begin, and what it finds on this machine."""

from __future__ import annotations

from collections.abc import Iterator

from kvtune.base.commands import command
from kvtune.base.errors import KvtuneError
from kvtune.data.show.terminal import one_line

URL = "http://localhost:8000"
DOORS = (
    ("a server that runs", ("watch", URL)),
    ("a request that missed", ("tap", URL)),
    ("settings for my traffic", ("tune", "MODEL", "-w", "WORKLOAD")),
    ("none of these yet", ("demo",)),
)
ANSWER_S = 1.0
"""How long a server on this machine may take to say its version."""


def doors() -> Iterator[str]:
    """Yield the lines: one for each door, then what is here."""
    yield "kvtune says where a vLLM engine loses prefix-cache hits and time, and finds settings that lose less."
    yield ""
    for need, words in DOORS:
        yield f"  {need:<24} {command(*words)}"
    yield ""
    yield f"Here: {_gpus()}; {_engine()}; {_server()}."
    yield "All commands: kvtune --help"


def _gpus() -> str:
    from kvtune.lab.setup.platform import gpus

    names = [gpu.name for gpu in gpus()]
    return f"{len(names)} x {names[0]}" if names else "no GPU"


def _engine() -> str:
    from kvtune.lab.setup.resolve import check_engine, installed_for

    try:
        return f"vLLM {check_engine()} for {'a CPU' if installed_for() == 'cpu' else 'GPUs'}"
    except KvtuneError as error:
        return error.message


def _server() -> str:
    from kvtune.servers.watch.client import Client

    client = Client(URL)
    try:
        answer = client.json("/version", dict[str, str], seconds=ANSWER_S, most=1 << 16)
        version = answer.get("version", "?")
    except KvtuneError:
        return f"no vLLM server at {URL}"
    finally:
        client.close()
    return f"a server of vLLM {one_line(version)} at {URL}"
