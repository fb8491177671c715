"""Makes an environment with another vLLM: `python -m bench.versions.environment VERSION FOLDER [PACKAGE ..]`."""

from __future__ import annotations

import sys
from pathlib import Path

from kvtune.answers.diff.environments import make
from kvtune.base.errors import KvtuneError

if __name__ == "__main__":
    try:
        make(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
    except KvtuneError as error:
        raise SystemExit(error.message) from error
