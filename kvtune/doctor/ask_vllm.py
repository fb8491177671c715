"""Asks vLLM about a model under given flags, in a child process (`child.py`) that loads no weights."""

from __future__ import annotations

import json
import subprocess

import msgspec

from kvtune import children
from kvtune.doctor.facts import Facts
from kvtune.engine.resolve import resolve
from kvtune.engine.setup import Setup
from kvtune.errors import KvtuneError
from kvtune.run.scratch import scratch

TIMEOUT_S = 300.0


def ask_vllm(setup: Setup) -> Facts:
    """Return facts from vLLM's own configuration and KV specs. KvtuneError, with its reason, if it refuses flags."""
    model = setup.model
    resolve(model, dummy=True, engine_args=setup.engine_args)  # a wrong name fails at once
    with scratch("doctor") as folder:
        answer = folder / "facts.json"
        question = msgspec.json.encode(setup).decode()
        command = children.python("kvtune.doctor.child", str(answer))
        try:
            done = children.answer(command, question=question, timeout_s=TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise KvtuneError(
                f"vLLM did not settle the configuration of {model} within {TIMEOUT_S:.0f} s",
                "a model by its hub name needs the network: give a folder with config.json",
            ) from error
        if not answer.exists():
            lines = [line for line in done.stderr.strip().splitlines() if line.strip()] or ["no message"]
            raise KvtuneError(
                f"the process that asks vLLM about {model} ended with code {done.returncode}: {lines[-1].strip()}",
                "run again with --debug and report it",
            )
        reply = json.loads(answer.read_text())
    if "message" in reply:
        raise KvtuneError(reply["message"], reply.get("hint", ""), int(reply.get("exit_code", 1)))
    return msgspec.convert(reply, Facts)
