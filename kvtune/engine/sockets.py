"""A folder for vLLM's sockets: a Unix socket's path holds 107 characters, and a temp folder's may be longer."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "VLLM_RPC_BASE_PATH"
LONGEST = 107 - len("/00000000-0000-0000-0000-000000000000")
"""Characters of a folder in which a socket with one of vLLM's names still fits."""

SHORT = (Path("/tmp"), Path("/var/tmp"), Path("/dev/shm"))


def socket_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Another folder for vLLM's sockets where the temp folder's path is too long; nothing where it fits, or was set."""
    if environ.get(VARIABLE) or len(os.fsencode(tempfile.gettempdir())) <= LONGEST:
        return {}
    usable = (folder for folder in SHORT if folder.is_dir() and os.access(folder, os.W_OK | os.X_OK))
    folder = next(usable, None)
    return {VARIABLE: str(folder)} if folder is not None else {}
