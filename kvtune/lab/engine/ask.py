"""Asks vLLM about a set-up, in a child process (`kvtune/answers/doctor/child.py`) that loads no weights.

The child's vLLM is that of the set-up's platform: of a GPU which this machine may lack, or this machine's.
"""

from __future__ import annotations

from typing import Any

from kvtune.base.dialogue import Answered, Dialogue, Refused
from kvtune.base.errors import KvtuneError
from kvtune.lab.setup.resolve import resolve
from kvtune.lab.setup.setup import Setup

TIMEOUT_S = 300.0


def facts(setup: Setup) -> dict[str, Any]:
    """Return the facts (`answers/doctor/facts.py`) from vLLM's own configuration and KV specs.

    KvtuneError with vLLM's reason if it refuses the flags.
    """
    return _ask("facts", setup)


def specs(setup: Setup) -> dict[str, Any]:
    """Return the KV specs and settings of the set-up's engine, as a run file has them (`plugin/probe/kv_specs.py`)."""
    return _ask("specs", setup)


def _ask(want: str, setup: Setup) -> dict[str, Any]:
    """Ask vLLM in a child process, as it settles what it is asked by starting. `want`: "facts" or "specs"."""
    model = setup.model
    resolve(model, dummy=True, engine_args=setup.engine_args)  # a wrong name fails at once
    dialogue: Dialogue[Answered | Refused] = Dialogue(Answered | Refused, "kvtune.answers.doctor.child", want)
    try:
        dialogue.ask(setup)
        reply = dialogue.answer(TIMEOUT_S)
    except TimeoutError as error:
        raise KvtuneError(
            f"vLLM did not settle the configuration of {model} within {TIMEOUT_S:.0f} s",
            "a model by its hub name needs the network: give a folder with config.json",
        ) from error
    except EOFError as error:
        code, line = dialogue.child.wait(), dialogue.last_line() or "no message"
        raise KvtuneError(
            f"the process that asks vLLM about {model} ended with code {code}: {line}",
            "run again with --debug and report it",
        ) from error
    finally:
        dialogue.end()
    if isinstance(reply, Refused):
        raise reply.error()
    return reply.facts
