"""Replays for `kvtune explain`: `python -m kvtune.sim.explain_worker FOLDER`, one line of numbers a batch.

Imports vLLM once; each question (FOLDER/N.question) is answered by a fork of this process (FOLDER/N.answer), because
one process runs one choice of core. Answers hold each request's hits and, when asked to listen, a verdict on each.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvtune.errors import KvtuneError
from kvtune.run.types import EngineInfo
from kvtune.sim.explain_listener import Fate, Listener, Verdict
from kvtune.sim.settings import SimSettings
from kvtune.workload.types import Span, Workload


class Question(msgspec.Struct, frozen=True, kw_only=True):
    spec: str
    seed: int
    workload_hash: str
    settings: SimSettings
    listen: bool


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """By place in the workload: hit tokens (-1: never admitted) and verdicts (None: never admitted)."""

    hits: list[int] = []
    verdicts: list[Verdict | None] = []
    engine: EngineInfo = EngineInfo()
    state: str = "complete"
    why: str = ""
    elapsed_s: float = 0.0
    message: str = ""  # an error, with its hint
    hint: str = ""
    exit_code: int = 1


class Watch:
    """The replay's observer that puts a Listener on its scheduler."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self.listener: Listener | None = None

    def started(self, engine: Any) -> None:
        from kvtune.sim.requests import with_answers

        spans: list[tuple[Span, ...]] = [request.prompt for request in with_answers(self._workload.requests)]
        clock = engine.model_executor.machine.clock
        self.listener = Listener(lambda name: spans[int(name)], clock)
        self.listener.attach(engine.scheduler)

    def sent(self, index: int, request: Any) -> None: ...

    def stepped(self, engine: Any, outputs: Any) -> None: ...

    def finished(self, index: int) -> None: ...


def answer(question: Question) -> Answer:
    """Replay the question's workload under its settings. Imports vLLM into this process."""
    from kvtune.sim.replay import replay
    from kvtune.workload.spec import build

    workload = build(question.spec, seed=question.seed)
    if question.workload_hash and workload.hash != question.workload_hash:
        raise KvtuneError(
            f"the workload {question.spec!r} is not the one that was run any more",
            "restore its file, or record the run again",
        )
    watch = Watch(workload)
    run = replay(workload, question.settings, observers=[watch] if question.listen else [])
    verdicts: list[Verdict | None] = []
    if watch.listener is not None:
        found = watch.listener.verdicts
        verdicts = [found.get(str(index)) for index in range(len(workload.requests))]
    header = run.header
    return Answer(
        hits=run.table("requests")["hit_tokens"].tolist(),
        verdicts=verdicts,
        engine=msgspec.structs.replace(header.engine, kv_specs={}),
        state=header.state,
        why=header.why,
        elapsed_s=float(header.extra.get("sim", {}).get("elapsed_s", 0.0)),
    )


def answer_file(folder: Path, number: int) -> None:
    """Answer one question; what goes wrong is in the answer."""
    try:
        question = msgspec.json.decode((folder / f"{number}.question").read_bytes(), type=Question)
        said = answer(question)
    except KvtuneError as error:
        said = Answer(message=error.message, hint=error.hint, exit_code=error.exit_code)
    except BaseException as error:
        text = str(error).strip().splitlines() or ["no message"]
        said = Answer(
            message=f"the replay failed: {type(error).__name__}: {text[0]}", hint="report it with the run"
        )
    part = folder / f"{number}.part"
    part.write_bytes(msgspec.json.encode(said))
    part.rename(folder / f"{number}.answer")


def answer_batch(folder: Path, numbers: Sequence[int], at_once: int) -> None:
    """Answer questions in forks of this process, `at_once` at a time."""
    running: set[int] = set()
    for number in numbers:
        if len(running) >= at_once:
            running.discard(os.wait()[0])
        child = os.fork()
        if child == 0:
            try:
                answer_file(folder, number)
            finally:
                os._exit(0)
        running.add(child)
    while running:
        running.discard(os.wait()[0])


def main(folder: Path, out: int) -> None:
    for name in ("vllm.v1.engine.core", "kvtune.sim.replay"):
        importlib.import_module(name)
    at_once = max(1, min(2, len(os.sched_getaffinity(0))))
    os.write(out, b"\n")
    for line in sys.stdin:
        answer_batch(folder, [int(word) for word in line.split()], at_once)
        os.write(out, b"\n")
    os._exit(0)  # torch and triton have nothing to put away, and say so at length


__all__ = ["Answer", "Fate", "Question", "Verdict", "answer", "main"]

if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
