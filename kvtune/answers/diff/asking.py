"""Asks versions of vLLM, two at once: each environment's Python runs one process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from kvtune.answers.diff.answers import Answers, ModelReply, OfVersion
from kvtune.answers.diff.environments import Environment
from kvtune.base.dialogue import Dialogue
from kvtune.base.errors import UsageError
from kvtune.lab.setup.setup import Setup


def asked(environments: Sequence[Environment], setups: Sequence[Setup]) -> list[Answers]:
    """Return what each environment's vLLM answers. UsageError for one that answers nothing at all."""
    with ThreadPoolExecutor(2 * len(environments)) as threads, contextlib.ExitStack() as stack:
        children = []
        for environment in environments:
            interpreter = stack.enter_context(environment.interpreter())
            child = Dialogue[OfVersion | ModelReply](
                OfVersion | ModelReply, "kvtune.answers.diff.child", interpreter=interpreter
            )
            stack.callback(child.end)  # its forks end with it
            children.append(child)
            threads.submit(_ask, child, setups)
        replies = threads.map(lambda child: list(_replies(child)), children)
        return [
            _read(environment, child.last_line(), answers, setups)
            for environment, child, answers in zip(environments, children, replies, strict=True)
        ]


def _ask(child: Dialogue[OfVersion | ModelReply], setups: Sequence[Setup]) -> None:
    with contextlib.suppress(EOFError):
        for setup in setups:
            child.ask(setup)
        child.close()


def _replies(child: Dialogue[OfVersion | ModelReply]) -> Iterator[OfVersion | ModelReply]:
    with contextlib.suppress(EOFError):
        while True:
            yield child.answer()


def _read(
    environment: Environment,
    line: str,
    replies: Sequence[OfVersion | ModelReply],
    setups: Sequence[Setup],
) -> Answers:
    last = line or "its log is empty"
    version = next((reply for reply in replies if isinstance(reply, OfVersion)), None)
    if version is None or not version.version:
        why = last if version is None else "it has no vLLM"
        raise UsageError(f"{environment.name} answers nothing: {why}", "give an environment that has vLLM")
    missed = [f"the process that asks vLLM ended: {last}"]
    models = {setup.model: ModelReply(model=setup.model, missed=missed) for setup in setups}
    models |= {reply.model: reply for reply in replies if isinstance(reply, ModelReply)}
    return Answers(version=version, models=models)
