"""The log of requests that a tap writes (docs/logs.md), which other commands read.

Token ids, times, counts; with `body` also text. Only this user can read it: token ids are text in another form. What
cannot be written is left out and counted, and later lines are tried again, in a new file if this one was moved or
removed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtune.base.errors import reason
from kvtune.base.files import lines_descriptor, write_lines
from kvtune.requests.log.logged import encoded

BY = "kvtune tap"
START = b'{"by": "kvtune tap", '


@dataclass
class LogFile:
    """Appends lines to a new file, or to a log of kvtune. Any other file is left as it is.

    `refused`: why the log's readers would refuse a line; "" if they take it.
    """

    path: Path
    refused: Callable[[bytes], str]
    missing: int = 0
    """Lines that could not be written since the last one that was."""
    why: str = ""
    """Why the last line was not written; "" if it was."""
    news: str = ""
    """What a person should know since the last line; "": nothing."""
    _descriptor: int = -1

    def open(self) -> None:
        """Open the file where its name stands now. OSError if it cannot."""
        with contextlib.suppress(FileNotFoundError):
            there, ours = self.path.stat(), self._descriptor
            if ours >= 0 and os.path.samestat(there, os.fstat(ours)):
                return
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            self.news = f"{self.path} was moved or removed: a new log is written"
        self._descriptor = lines_descriptor(self.path, START)

    def add(self, line: Mapping[str, Any]) -> None:
        """Write a line, unless `why`."""
        self.news = self.why = ""
        try:
            text = encoded(line)
            self.why = self.refused(bytes(text))
        except ValueError as error:
            self.why = reason(error)
        if self.why:
            return
        try:
            self.open()
            self.why = "" if write_lines(self._descriptor, text) else "the disk is full"
        except OSError as error:
            self.why = reason(error)
        if self.why:
            self.missing += 1
            self.news = f"{self.path} cannot be written: {self.why}"
        elif self.missing:
            self.news = f"{self.path} is written again: {self.missing} requests are missing in it"
            self.missing = 0
