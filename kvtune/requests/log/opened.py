"""Opens the text file that a workload's `path=` names. A run file has no prompts: the error says what to give."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from kvtune.base.errors import UsageError
from kvtune.base.files import open_regular

RUN_FILE = (
    "is a run file: it has times and hits of requests, and no prompts, so neither requests nor sessions can be played",
    "give the log of the same requests: `kvtune tap URL -o LOG` or `kvtune serve --record LOG` writes one; a run of "
    "`kvtune profile` names its workload in `kvtune report`",
)
"""What is missing, and what to give instead."""
ZIPPED_HEADER = b"PK\x03\x04" + 26 * b"." + b"header.json"
"""The first bytes of a run file, where those that differ are dots: a zip whose first part is the header."""


def is_run_file(content: bytes) -> bool:
    head = content[: len(ZIPPED_HEADER)]
    return head[:4] == ZIPPED_HEADER[:4] and head[30:] == ZIPPED_HEADER[30:]


@contextmanager
def opened(file: Path, what: str = "trace") -> Iterator[IO[str]]:
    """Open the text file that a workload's `path=` names. UsageError if the file cannot be read."""
    try:
        raw = open_regular(file)
        with io.TextIOWrapper(raw, encoding="utf-8", newline="") as stream:
            if is_run_file(raw.read(len(ZIPPED_HEADER))):
                raise UsageError(f"{file} {RUN_FILE[0]}", RUN_FILE[1])
            raw.seek(0)
            yield stream
    except FileNotFoundError as error:
        raise UsageError(f"no {what} file {file}", "check path= in the workload") from error
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{file} is not a text file: {error.reason}", "decompress it first if it is compressed"
        ) from error
    except OSError as error:
        raise UsageError(
            f"cannot read the {what} file {file}: {error.strerror or error}", "check path= in the workload"
        ) from error
