"""The process that answers for a version: `PYTHON -m kvtune.diff.child ANSWER`, with the PYTHON of its environment.

Reads a `Question` (JSON) on standard input, and adds a line to the file ANSWER for the version and for each model.
A fork asks each: vLLM keeps much in a process, and a model may end it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import enum
import gc
import importlib
import os
import re
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from kvtune.diff.answers import PREFIX_TOKENS, SUFFIX_TOKENS, VISITS, Flag, OfModel, OfVersion, Question
from kvtune.engine.faults import hub_fault
from kvtune.engine.flags import flag_value
from kvtune.engine.setup import Setup
from kvtune.errors import KvtuneError
from kvtune.fake_device.blocks import NO_ROOM
from kvtune.files import appending
from kvtune.probe.lifetime import die_with_parent
from kvtune.vllm.manifest import installed_version
from kvtune.vllm.names import serve_parser
from kvtune.workload.types import Span

LIMIT_S = 240
MOST_GPUS = 64
TOO_LONG = "max seq len"
"""Part of vLLM's message about a pool that cannot hold one request of the longest length."""
EARLY = (
    "vllm.v1.engine.core",
    "vllm.engine.arg_utils",
    "vllm.model_executor.models.llama",
    "kvtune.doctor.child",
)
"""What each fork needs: imported once."""
METRIC = re.compile(rb'"(vllm:[a-z0-9_]+)"')
SWITCH = re.compile(r"^--(no-|enable-|disable-)+")
MOST_TEXT, MOST_ITEMS = 120, 8
UNLIKE = re.compile(
    r"(^|\.)_|hash|instance_id|ports?$|_ip$|host$|_dir$|_path$|_time$|SHM_BUFFER_NAME|^model\.(hf|model$|tokenizer$)"
)
"""Settings and variables of this process or of the model's file, not of the version."""


def main(answer: Path) -> None:
    from kvtune.sim.build import run_on

    question = msgspec.json.decode(sys.stdin.buffer.read(), type=Question)
    gc.disable()  # forks share the memory, and end soon
    run_on(question.setups[0].platform)
    for module in EARLY:
        with contextlib.suppress(ImportError):  # of another version: a fork says what is missing
            importlib.import_module(module)
    version = installed_version()
    _apart(answer, of_version, OfVersion(version=version))
    for setup in question.setups:
        _apart(answer, partial(of_model, setup), OfModel(model=setup.model))


def _apart(answer: Path, ask: Callable[[], OfVersion | OfModel], failed: OfVersion | OfModel) -> None:
    """Ask in a fork, which adds its answer to the file; if it ends without one, add `failed` with the reason."""

    def without(why: str) -> OfVersion | OfModel:
        if isinstance(failed, OfVersion):
            return msgspec.structs.replace(failed, missed=[why])
        return msgspec.structs.replace(failed, why=why)

    child = os.fork()
    if child == 0:
        try:
            die_with_parent(signal.SIGKILL)
            signal.alarm(LIMIT_S)
            try:
                reply = ask()
            except Exception as error:
                reply = without(reason(error))
            _add(answer, reply)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        took = f"took more than {LIMIT_S} s" if name == "SIGALRM" else f"was ended by {name}"
        _add(answer, without(f"the process that asks vLLM {took}"))


def _add(answer: Path, reply: msgspec.Struct) -> None:
    with appending(answer) as file:
        file.write(msgspec.json.encode(reply) + b"\n")


def reason(error: BaseException) -> str:
    """Return one line about an error."""
    if isinstance(error, KvtuneError):
        return error.message
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    return f"{type(error).__name__}: {lines[0][:300]}"


def of_model(setup: Setup) -> OfModel:
    """Ask about one model. It is spread over as many GPUs as it needs, unless a flag says how many."""
    from kvtune.sim.build import choose_core

    choose_core(setup)
    sized = setup
    if setup.machine.memory_bytes or setup.sizes_pool:
        sized = setup.sized()
    spread = sized.machine.kind == "cuda" and flag_value(setup.engine_args, "tensor-parallel-size") is None
    gpus = 1
    while True:
        try:
            return _asked(sized.with_flags(tensor_parallel_size=gpus) if gpus > 1 else sized, gpus)
        except NoRoomError as error:
            if not spread or gpus == MOST_GPUS:
                return error.known
            gpus *= 2


class NoRoomError(Exception):
    """The weights leave no memory, or too little for one request. `known`: what is known all the same."""

    def __init__(self, known: OfModel) -> None:
        super().__init__(known.why)
        self.known = known


def _asked(setup: Setup, gpus: int) -> OfModel:
    from kvtune.doctor.child import facts_from, replay, started
    from kvtune.sim.build import configure

    known = OfModel(model=setup.model, gpus=gpus)
    try:
        config, stages, layouts = configure(setup)
        runner = "V2" if getattr(config, "use_v2_model_runner", False) else "V1"
        settings = settings_of(config) | {"model_runner": runner}
        known = msgspec.structs.replace(known, settings=settings)
        with started(config, stages, layouts) as begun:
            facts = facts_from(setup, config, stages, begun)
            prefix = min(PREFIX_TOKENS, facts.max_model_len - 2 - SUFFIX_TOKENS)
            prompts = [
                (Span(7, 0, prefix), Span(8, visit * SUFFIX_TOKENS, SUFFIX_TOKENS)) for visit in range(VISITS)
            ]
            hits = replay(begun.engine, prompts) if facts.caching and prefix > 0 else [0] * VISITS
    except Exception as error:
        fault = hub_fault(str(error), setup.model)
        known = msgspec.structs.replace(known, why=fault[0] if fault else reason(error))
        if NO_ROOM in known.why or TOO_LONG in known.why:
            raise NoRoomError(known) from error
        return known
    facts = msgspec.structs.replace(facts, config={})
    return msgspec.structs.replace(known, facts=facts, prompt=prefix + SUFFIX_TOKENS, hits=hits)


def settings_of(config: Any, above: str = "") -> dict[str, str]:
    """Return the plain values of a configuration, by dotted names without `_config`."""
    found: dict[str, str] = {}
    for field in dataclasses.fields(config):
        name = f"{above}{field.name.removesuffix('_config')}"
        value = getattr(config, field.name, None)
        if UNLIKE.search(name):
            continue
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            found |= settings_of(value, f"{name}.")
        elif (text := text_of(value)) is not None:
            found[name] = text
    return found


def text_of(value: Any) -> str | None:
    """Return a plain value as text; None for one that is an object of vLLM's, or of a process."""
    if isinstance(value, enum.Enum):
        return str(value.name)
    if isinstance(value, list | tuple | set | frozenset):
        shown = [str(text_of(one)) for one in value if text_of(one) is not None]
        if len(shown) < len(value):
            return None
        shown = sorted(shown) if isinstance(value, set | frozenset) else shown
        more = f", .. {shown[-1]} ({len(shown)} of them)" if len(shown) > MOST_ITEMS else ""
        return f"[{', '.join(shown[:MOST_ITEMS])}{more}]"
    if type(value).__name__ == "dtype":
        return str(value).removeprefix("torch.")
    if value is not None and not isinstance(value, bool | int | float | str):
        return None
    text = str(value)
    return None if "/" in text or " at 0x" in text else text[:MOST_TEXT]


def of_version() -> OfVersion:
    """Return what the installed version names: flags, variables, metrics, the fields of KV events."""
    found: dict[str, Any] = {}
    missed = []
    for what, ask in (("flags", flags), ("variables", variables), ("metrics", metrics), ("events", events)):
        try:
            found[what] = ask()
        except Exception as error:
            missed.append(f"{what}: {reason(error)}")
    return OfVersion(version=installed_version(), site=str(_root().parent), missed=missed, **found)


def flags() -> dict[str, Flag]:
    """Return the flags of `vllm serve` by their names; a switch has one name, without its opposite."""
    found: dict[str, Flag] = {}
    for action in serve_parser()._actions:
        names = [name for name in action.option_strings if name.startswith("--")]
        bare = [SWITCH.sub("--", name) for name in names]
        for number, name in enumerate(names):
            if bare[number] in bare[:number]:
                continue
            said = "" if action.help in (None, argparse.SUPPRESS) else str(action.help)
            default = "" if action.default is argparse.SUPPRESS else text_of(action.default)
            found[name] = Flag(
                default=type(action.default).__name__ if default is None else default,
                dest=action.dest,
                help=" ".join(said.split()),
            )
    return found


def variables() -> dict[str, str]:
    """Return vLLM's environment variables with their defaults; "" for a place, and for what is drawn at random."""
    from vllm import envs

    found: dict[str, str] = {}
    for name, read in envs.environment_variables.items():
        os.environ.pop(name, None)  # this fork's
        try:
            found[name] = "" if UNLIKE.search(name) else text_of(read()) or ""
        except Exception:
            found[name] = ""
    return found


def _root() -> Path:
    import vllm

    return Path(str(vllm.__file__)).parent


def metrics() -> list[str]:
    """Return the names of metrics in vLLM's files: which of them a server has depends on its flags."""
    return sorted(
        {name.decode() for path in _root().rglob("*.py") for name in METRIC.findall(path.read_bytes())}
    )


def events() -> dict[str, list[str]]:
    """Return the kinds of KV events, each with its fields in the order in which they are sent."""
    from vllm.distributed import kv_events

    return {
        name: list(kind.__struct_fields__)
        for name, kind in vars(kv_events).items()
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind is not msgspec.Struct
    }


if __name__ == "__main__":
    die_with_parent(signal.SIGKILL)
    main(Path(sys.argv[1]))
