"""The journal of a study: JSON lines, a header, then each trial when it ends. A crash loses only the running trial.

A file lock, released when its process ends, keeps other writers out. On opening, an incomplete last line is cut off,
but only in a file whose first line is this study's header. A symbolic link is refused.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, Self, TypeVar

import msgspec

from kvtune.answers.tune.result import Kind, Trial
from kvtune.answers.tune.trials.setup import check_settings
from kvtune.base.bounded import decode_json_as
from kvtune.base.errors import KvtuneError, UsageError, reason
from kvtune.base.files import appending
from kvtune.base.masking import without_secrets
from kvtune.data.run.ranges import check_numbers
from kvtune.data.tally import Hits
from kvtune.lab.setup.setup import Setup

FORMAT = 1
MOST_BYTES = 1 << 30
"""Size limit of a journal: about 200,000 trials."""
Line = TypeVar("Line")


class _Tier(msgspec.Struct, frozen=True):
    tier_bytes: int
    tier_hit_rate: float | None = None


class _Summary(msgspec.Struct, frozen=True):
    """The fields of a trial's summary that pages use besides the objectives' figures; read to check their types."""

    prefix_cache: Hits | None = None
    offload: _Tier | None = None


class Head(msgspec.Struct, frozen=True, kw_only=True):
    kvtune_journal: int
    kind: Kind
    bench: dict[str, Any]


def decoded(line: bytes, kind: type[Line]) -> Line:
    """Return a line of a journal or a result. ValueError names what is wrong with it."""
    plain = decode_json_as(line, object)
    check_numbers(plain)
    return msgspec.convert(plain, kind)


def trials_in(lines: Iterable[bytes], path: Path, hint: str) -> Iterator[tuple[str, Trial]]:
    """Yield each trial, of a journal's lines after its head, and where it stands. `hint`: for a line that is none."""
    for number, line in enumerate(lines, start=2):
        where = f"{path}, line {number}"
        try:
            trial = decoded(line, Trial)
            msgspec.convert(trial.summary, _Summary)
        except ValueError as error:
            raise UsageError(f"{where}: not a trial: {reason(error)}", hint) from error
        yield where, trial


class StudyJournal:
    """Open with `with`. `trials`: all trials in the file, those of earlier commands first."""

    def __init__(self, path: Path, kind: Kind, setup: Setup) -> None:
        self.path = path
        self.trials: list[Trial] = []
        own = {**setup.filed(), "engine_args": without_secrets(setup.engine_args)}
        self._head = Head(kvtune_journal=FORMAT, kind=kind, bench=own)
        self._file: IO[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = appending(self.path)
        except OSError as error:
            raise UsageError(
                f"the journal {self.path} cannot be opened: {error.strerror or error}",
                "name another with --study FILE",
            ) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise UsageError(
                f"the journal {self.path} is in use by another kvtune",
                "wait for it, or name another with --study FILE",
            ) from error
        try:
            self._load()
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, trial: Trial) -> None:
        """Append a finished trial, and return when it is on disk."""
        self._write(msgspec.json.encode(trial))
        self.trials.append(trial)

    def _write(self, line: bytes) -> None:
        assert self._file is not None
        try:
            self._file.write(line + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise KvtuneError(
                f"the journal {self.path} cannot be written: {error.strerror or error}",
                f"free space and resume with --study {self.path}: {len(self.trials)} trials are kept",
            ) from error

    def _load(self) -> None:
        assert self._file is not None
        self._file.seek(0)
        if os.fstat(self._file.fileno()).st_size > MOST_BYTES:
            raise UsageError(
                f"the journal {self.path} is larger than {MOST_BYTES:,} bytes",
                "name another with --study FILE",
            )
        whole = self._file.read()
        *lines, torn = whole.split(b"\n")
        head = msgspec.json.encode(self._head)
        if lines or not head.startswith(torn):
            self._check(lines[0] if lines else torn)
        if torn:
            self._file.truncate(len(whole) - len(torn))
        if not lines:
            self._write(head)
            return
        for where, trial in trials_in(lines[1:], self.path, "remove the line; its trial will run again"):
            check_settings(trial.settings, where)
            self.trials.append(trial)

    def _check(self, line: bytes) -> None:
        try:
            head = decoded(line, Head)
            journalled = Setup.of_file(head.bench).filed()
        except ValueError as error:
            raise UsageError(
                f"{self.path} is not a journal of kvtune: {reason(error)}",
                "name another file with --study FILE",
            ) from error
        if head.kvtune_journal != FORMAT or head.kind != self._head.kind:
            raise UsageError(
                f"{self.path} is a journal of `kvtune {head.kind}`, format {head.kvtune_journal}",
                "name another file with --study FILE",
            )
        for field, given in self._head.bench.items():
            if given != journalled[field]:
                raise UsageError(
                    f"{self.path} belongs to another study: {field} was {journalled[field]!r}, "
                    f"now it is {given!r}",
                    "run the same command line, or name another journal with --study FILE",
                )
