"""Makes a folder for one engine's sockets, removed with the run. vLLM would leave them in the temp folder.

A Unix socket's path holds 107 characters: if the temp folder's path is too long, a folder with a shorter path is used.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from kvtune.errors import KvtuneError
from kvtune.run.scratch import PREFIX, scratch

VARIABLE = "VLLM_RPC_BASE_PATH"
KIND = "ipc"
LONGEST = 107 - len("/00000000-0000-0000-0000-000000000000")
"""The most characters that the folder's path may have, so that vLLM's socket names still fit."""

LONGEST_PARENT = LONGEST - len(f"/{PREFIX}{KIND}-12345678")
SHORT = (Path("/tmp"), Path("/var/tmp"), Path("/dev/shm"))


@contextmanager
def socket_folder(environ: Mapping[str, str] = os.environ) -> Iterator[dict[str, str]]:
    """Make the folder and yield the variable that names it; {} if the user set it, or no folder can be made."""
    with ExitStack() as stack:
        variables: dict[str, str] = {}
        for parent in (Path(tempfile.gettempdir()), *SHORT) if not environ.get(VARIABLE) else ():
            if len(os.fsencode(parent)) <= LONGEST_PARENT and os.access(parent, os.W_OK | os.X_OK):
                try:
                    variables = {VARIABLE: str(stack.enter_context(scratch(KIND, parent)))}
                except KvtuneError:  # a full disk: try the next one
                    continue
                break
        yield variables
