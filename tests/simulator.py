"""One simulator process for all tests of a pytest worker: vLLM is imported once, not by every command under test.

`SHARED` is the lab that tests hand over: its simulators borrow the process instead of starting one, as long as
nobody else has borrowed it; one process is kept for each of two environments. Whoever stops it or leaves jobs running
ends it; the next one starts it again. A test of the process itself (signals, its environment) takes `Simulators`.

`run` is what tests call for the command line: what a command prints with `--json` must hold to its schema.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import redirect_stdout
from functools import cache
from types import TracebackType
from typing import Any, cast

from jsonschema import Draft202012Validator

from kvtune.base.errors import KvtuneError
from kvtune.cli import app
from kvtune.cli.schema import schema_of
from kvtune.data.platforms import Platform
from kvtune.data.run.types import Run
from kvtune.lab.lab import Lab
from kvtune.lab.setup.setup import Setup
from kvtune.lab.sim import simulators
from kvtune.lab.sim.simulators import Simulators
from kvtune.lab.sim.worker import Report
from kvtune.requests.types import Workload

SEEN = ("KVTUNE_", "VLLM_", "HF_", "PYTHONHASHSEED", "CUDA_", "HOME", "PATH")
"""What a simulator may read of its environment."""
UNREAD = (
    *("KVTUNE_OUTPUT", "KVTUNE_REPLAYS", "KVTUNE_CORE", "KVTUNE_SET", "VLLM_WORKER_MULTIPROC_METHOD"),
    *(
        "VLLM_DISABLE_SHARED_EXPERTS_STREAM",
        "VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME",
        "VLLM_SSM_CONV_STATE_LAYOUT",
    ),
)
"""Except these: its jobs name their files and their core; the others vLLM sets itself, once a test makes an engine."""


KEPT = 2


class Lent(Simulators):
    """Borrows the shared process; starts its own if another has borrowed it."""

    def __enter__(self) -> Simulators:
        return LENDER.lend(self) if LENDER.borrower is None else super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self is LENDER.borrower:
            LENDER.take_back()
        else:
            super().__exit__(kind, error, trace)


class Lender:
    """Keeps a process for each of the two environments that were borrowed in last."""

    def __init__(self) -> None:
        self.kept: dict[frozenset[tuple[str, str]], Simulators] = {}
        self.borrower: Simulators | None = None

    def lend(self, borrower: Simulators) -> Simulators:
        environment = frozenset(seen().items())
        shared = self.kept.pop(environment, None)
        if shared is None:
            while len(self.kept) >= KEPT:
                self.kept.pop(next(iter(self.kept))).__exit__(None, None, None)
            shared = Simulators(simulators.replays_at_once()).__enter__()
        self.kept[environment] = shared
        for name in ("_scratch", "_folder", "_worker"):
            setattr(borrower, name, getattr(shared, name))
        self.borrower = borrower
        return borrower

    def take_back(self) -> None:
        assert self.borrower is not None
        worker = self.borrower._worker
        assert worker is not None and worker.child.stdin is not None
        whole = not (self.borrower.running or self.borrower._queued or worker.frames)
        self.borrower = None
        if not whole or worker.child.stdin.closed or worker.child.poll() is not None:
            lent = next(one for one, shared in self.kept.items() if shared._worker is worker)
            self.kept.pop(lent).__exit__(None, None, None)

    def end(self) -> None:
        while self.kept:
            self.kept.popitem()[1].__exit__(None, None, None)


LENDER = Lender()


class SharedLab(Lab):
    """This machine's engines, and the simulator that all tests of the process share."""

    def simulators(self, model: str = "", platform: Platform | None = None) -> Simulators:
        return Lent(model=model, platform=platform)


SHARED = SharedLab()


def run(argv: Sequence[str], lab: Lab = SHARED) -> int:
    """Run a command line of kvtune in this process; its replays share a simulator."""
    if "--json" not in argv:
        return app.run(argv, lab)
    printed = Printed(sys.stdout)
    with redirect_stdout(cast("Any", printed)):
        code = app.run(argv, lab)
    text = "".join(printed.texts).strip()
    if code in (0, 1, 3) and text:
        check_schema(argv, text)
    return code


class Printed:
    """A stream, and what is printed on it."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.texts = stream, list[str]()

    def write(self, text: str) -> int:
        self.texts.append(text)
        return int(self.stream.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def check_schema(argv: Sequence[str], text: str) -> None:
    """What a command printed with `--json` holds to the schema of that command."""
    words = [word for word in argv if not word.startswith("-")]
    command = " ".join(words[:2]) if words[0] == "recipe" else words[0]
    for document in text.splitlines() if command in ("watch", "tap") else [text]:
        validator(command).validate(json.loads(document))


@cache
def validator(command: str) -> Draft202012Validator:
    return Draft202012Validator(schema_of(command))


class Borrowed(Simulators):
    """What tests take for `Simulators`: it borrows the process for each batch of jobs."""

    def run(
        self, setups: Iterable[Setup], watch: Callable[[Report], None] | None = None
    ) -> Iterator[tuple[int, Run | KvtuneError]]:
        with Lent() as started:
            yield from started.run(setups, watch)


def on(workload: Workload, setups: Iterable[Setup]) -> list[Setup]:
    """The set-ups, each with this load."""
    return [setup.with_load(workload) for setup in setups]


def simulate(workload: Workload, settings: Setup) -> Run:
    """One replay; KvtuneError when it fails."""
    with Lent(1) as started:
        return started.replay(settings.with_load(workload))


def seen() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(SEEN) and name not in UNREAD}
