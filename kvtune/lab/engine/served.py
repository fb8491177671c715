"""Starts `vllm serve` on a free port of this machine, for a command that asks it. In the CLI's process.

No process is left behind: the server ends with the command, also if that is killed (`serve.py`).
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence

from kvtune.base import children
from kvtune.base.files import appending, read_regular
from kvtune.base.scratch import scratch
from kvtune.data.flags import flag_value
from kvtune.lab.engine.faults import last_lines
from kvtune.lab.engine.messages import LOG_FILE
from kvtune.lab.engine.process import born, kill_tree

MOST_BYTES = 64 << 20
"""Size limit of a log that is read."""
GRACE_S = 15.0
"""Seconds for the server to shut the engine down before it is killed."""


def command_of(model: str, words: Sequence[str]) -> list[str]:
    """Return the command that serves a model with vLLM's flags, which name it by `--model`."""
    place = words.index("--model")
    flags = [*words[:place], *words[place + 2 :]]
    named = [] if flag_value(flags, "served-model-name") else ["--served-model-name", model]
    return children.python("kvtune.lab.engine.serve", words[place + 1], *flags, *named)


@contextlib.contextmanager
def served(command: Sequence[str], variables: Mapping[str, str]) -> Iterator[tuple[str, Callable[[], str]]]:
    """Start a server's command; yield its URL, and what tells why it has ended: "" while it runs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with scratch("served") as folder, appending(folder / LOG_FILE) as log:
        server = children.start(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            variables={**variables, "KVTUNE_RUN_DIR": str(folder)},
            start_new_session=True,
        )
        began = born(server.pid)

        def ended() -> str:
            if server.poll() is None:
                return ""
            lines = last_lines(read_regular(folder / LOG_FILE, MOST_BYTES).decode(errors="replace"))
            return [f"exit code {server.returncode}", *lines][-1]

        try:
            yield f"http://127.0.0.1:{port}", ended
        finally:
            kill_tree(server.pid, GRACE_S, began)
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(timeout=5)
