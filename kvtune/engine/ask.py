"""Asks vLLM about a set-up, in a child process (`kvtune/doctor/child.py`) that loads no weights.

The child's vLLM is that of the set-up's platform: of a GPU which this machine may lack, or this machine's.
"""

from __future__ import annotations

import json
import subprocess
from typing import Any

import msgspec

from kvtune import children
from kvtune.engine.resolve import resolve
from kvtune.engine.setup import Setup
from kvtune.errors import KvtuneError
from kvtune.run.scratch import scratch

TIMEOUT_S = 300.0


def facts(setup: Setup) -> dict[str, Any]:
    """Return the facts (`doctor/facts.py`) from vLLM's own configuration and KV specs.

    KvtuneError with vLLM's reason if it refuses the flags.
    """
    return _ask("facts", setup)


def specs(setup: Setup) -> dict[str, Any]:
    """Return the KV specs and settings of the set-up's engine, as a run file has them (`probe/kv_specs.py`)."""
    return _ask("specs", setup)


def _ask(want: str, setup: Setup) -> dict[str, Any]:
    model = setup.model
    resolve(model, dummy=True, engine_args=setup.engine_args)  # a wrong name fails at once
    with scratch("ask") as folder:
        answer = folder / "answer.json"
        question = msgspec.json.encode(setup).decode()
        command = children.python("kvtune.doctor.child", str(answer), want)
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
        reply: dict[str, Any] = json.loads(answer.read_text())
    if "message" in reply:
        raise KvtuneError(reply["message"], reply.get("hint", ""), int(reply.get("exit_code", 1)))
    return reply
