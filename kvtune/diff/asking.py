"""Asks versions of vLLM, two at once: each environment's Python runs one process."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kvtune import children
from kvtune.diff.answers import Answers, OfModel, OfVersion
from kvtune.engine.setup import Setup
from kvtune.errors import UsageError
from kvtune.files import appending, creating
from kvtune.run.scratch import scratch
from kvtune.vllm.environments import Environment


def asked(environments: Sequence[Environment], setups: Sequence[Setup]) -> list[Answers]:
    """Return what each environment's vLLM answers. UsageError for one that answers nothing at all."""
    with scratch("ask") as work, contextlib.ExitStack() as stack:
        with creating(work / "question") as part:
            part.write(msgspec.json.encode(list(setups)))
        running = []
        for number, environment in enumerate(environments):
            interpreter = stack.enter_context(environment.interpreter())
            child = children.start(
                interpreter.python(
                    "kvtune.diff.child", str(work / "question"), str(work / f"{number}.jsonl")
                ),
                variables=interpreter.variables,
                stdout=stack.enter_context(appending(work / f"{number}.log")),
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            stack.callback(child.wait)
            stack.callback(child.kill)  # nothing for one that has ended; its forks end with it
            running.append(child)
        for child in running:
            child.wait()
        return [
            _read(environment, work / str(number), setups) for number, environment in enumerate(environments)
        ]


def _read(environment: Environment, answer: Path, setups: Sequence[Setup]) -> Answers:
    lines = path.read_bytes().splitlines() if (path := answer.with_suffix(".jsonl")).exists() else []
    replies = [msgspec.json.decode(line, type=OfVersion | OfModel) for line in lines]
    version = next((reply for reply in replies if isinstance(reply, OfVersion)), None)
    log = answer.with_suffix(".log").read_text(errors="replace").strip().splitlines() or ["its log is empty"]
    if version is None or not version.version:
        why = log[-1] if version is None else "it has no vLLM"
        raise UsageError(f"{environment.name} answers nothing: {why}", "give an environment that has vLLM")
    missed = [f"the process that asks vLLM ended: {log[-1]}"]
    models = {setup.model: OfModel(model=setup.model, missed=missed) for setup in setups}
    models |= {reply.model: reply for reply in replies if isinstance(reply, OfModel)}
    return Answers(version=version, models=models)
