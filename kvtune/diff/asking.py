"""Asks versions of vLLM, two at once: each environment's Python runs one process."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kvtune import children
from kvtune.diff.answers import Answers, OfModel, OfVersion, Question
from kvtune.diff.environments import Environment
from kvtune.engine.setup import Setup
from kvtune.errors import KvtuneError
from kvtune.files import appending, creating
from kvtune.run.scratch import scratch


def asked(environments: Sequence[Environment], setups: Sequence[Setup]) -> list[Answers]:
    """Return what each environment's vLLM answers. KvtuneError for one that answers nothing at all."""
    with contextlib.ExitStack() as stack:
        work = stack.enter_context(scratch("ask"))
        question = work / "question.json"
        with creating(question) as part:
            part.write(msgspec.json.encode(Question(setups=list(setups))))
        running: list[children.Child] = []
        for number, one in enumerate(environments):
            interpreter = stack.enter_context(one.interpreter())
            answer, log = work / f"{number}.jsonl", stack.enter_context(appending(work / f"{number}.log"))
            child = children.start(
                interpreter.python("kvtune.diff.child", str(answer)),
                variables=interpreter.variables,
                stdin=stack.enter_context(question.open("rb")),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            stack.callback(_end, child)
            running.append(child)
        for child in running:
            child.wait()
        return [_read(work, number, one, setups) for number, one in enumerate(environments)]


def _end(child: children.Child) -> None:
    if child.poll() is None:
        child.send_signal(signal.SIGKILL)  # its forks end with it
        child.wait()


def _read(work: Path, number: int, environment: Environment, setups: Sequence[Setup]) -> Answers:
    path = work / f"{number}.jsonl"
    lines = path.read_bytes().splitlines() if path.exists() else []
    replies = [msgspec.json.decode(line, type=OfVersion | OfModel) for line in lines]
    version = next((reply for reply in replies if isinstance(reply, OfVersion)), None)
    log = (work / f"{number}.log").read_text(errors="replace").strip().splitlines() or ["its log is empty"]
    if version is None or not version.version:
        why = log[-1] if version is None else "it has no vLLM"
        raise KvtuneError(f"{environment.name} answers nothing: {why}", "give an environment that has vLLM")
    models = {reply.model: reply for reply in replies if isinstance(reply, OfModel)}
    unasked = {
        setup.model: OfModel(model=setup.model, why=f"the process that asks vLLM ended: {log[-1]}")
        for setup in setups
        if setup.model not in models
    }
    return Answers(version=version, models={**models, **unasked})
