"""The process that answers for a version: `PYTHON -m kvtune.diff.child SETUPS ANSWER`, PYTHON that of its environment.

Reads a list of set-ups (JSON), and adds a line to the file ANSWER for the version and for each model. A fork asks
each: vLLM keeps much in a process, and a model may end it.
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
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from kvtune.diff.answers import PREFIX_TOKENS, SUFFIX_TOKENS, VISITS, Figures, Flag, OfModel, OfVersion
from kvtune.doctor.facts import Facts
from kvtune.engine.faults import hub_fault
from kvtune.engine.flags import flag_value
from kvtune.engine.models import FOLDER
from kvtune.engine.setup import Setup
from kvtune.errors import KvtuneError
from kvtune.fake_device.blocks import NO_ROOM
from kvtune.files import appending
from kvtune.probe.lifetime import die_with_parent
from kvtune.vllm.manifest import installed_version
from kvtune.vllm.names import serve_parser
from kvtune.workload.types import Span

Reply = OfVersion | OfModel
LIMIT_S = 240
MOST_GPUS = 64
FULL = (NO_ROOM, "max seq len")
"""Parts of messages about weights that leave no memory, and about a pool that cannot hold one longest request."""
EARLY = (
    "vllm.v1.engine.core",
    "vllm.engine.arg_utils",
    "vllm.model_executor.models.llama",
    "kvtune.doctor.child",
)
"""What each fork needs: imported once."""
METRIC = re.compile(rb'"(vllm:[a-z0-9_]+)"')
SWITCH = re.compile(r"^--(no-|enable-|disable-)+")
UNLIKE = re.compile(
    r"(^|\.)_|hash|instance_id|ports?$|_ip$|host$|_dir$|_path$|_time$|SHM_BUFFER_NAME|^model\.(hf|model$|tokenizer$)"
)
"""Settings and variables of this process or of the model's file, not of the version."""


def main(question: Path, answer: Path) -> None:
    from kvtune.sim.build import run_on

    setups = msgspec.json.decode(question.read_bytes(), type=list[Setup])
    gc.disable()  # forks share the memory, and end soon
    run_on(setups[0].platform)
    for module in EARLY:
        with contextlib.suppress(ImportError):  # of another version: a fork says what is missing
            importlib.import_module(module)
    _apart(answer, of_version, OfVersion(version=installed_version()))
    for setup in setups:
        _apart(answer, partial(of_model, setup), OfModel(model=setup.model))


def _apart(answer: Path, ask: Callable[[], Reply], nothing: Reply) -> None:
    """Ask in a fork, which adds its answer to the file; if it has none, add `nothing` with the reason."""

    def add(reply: Reply) -> None:
        with appending(answer) as file:
            file.write(msgspec.json.encode(reply) + b"\n")

    child = os.fork()
    if child == 0:
        try:
            die_with_parent(signal.SIGKILL)
            signal.alarm(LIMIT_S)
            try:
                reply = ask()
            except Exception as error:
                reply = replace(nothing, missed=[reason(error)])
            add(reply)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        why = f"the process that asks vLLM was ended by {name} (SIGALRM: after {LIMIT_S} s)"
        add(replace(nothing, missed=[why]))


def reason(error: BaseException, model: str = "") -> str:
    """Return one line about an error. A built-in model's folder is this process's own: its name stays."""
    text = str(error).replace(f"{FOLDER}/", "")
    if isinstance(error, KvtuneError):
        return text
    if model and (fault := hub_fault(text, model)):
        return fault[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no message"]
    return f"{type(error).__name__}: {lines[0][:300]}"


def of_model(setup: Setup) -> OfModel:
    """Ask about one model. It is spread over as many GPUs as it needs, unless a flag says how many."""
    from kvtune.sim.build import choose_core

    choose_core(setup)
    sized = setup.sized() if setup.machine.memory_bytes or setup.sizes_pool else setup
    spread = sized.machine.kind == "cuda" and flag_value(setup.engine_args, "tensor-parallel-size") is None
    gpus = 1
    while True:
        reply = _asked(sized.with_flags(tensor_parallel_size=gpus) if gpus > 1 else sized, gpus)
        if not spread or gpus == MOST_GPUS or not any(text in why for text in FULL for why in reply.missed):
            return reply
        gpus *= 2


def _asked(setup: Setup, gpus: int) -> OfModel:
    """Ask about one model on this many GPUs. What is known before an error is kept."""
    from kvtune.doctor.child import facts_from, replay, started
    from kvtune.sim.build import configure

    reply = OfModel(model=setup.model)
    try:
        config, stages, layouts = configure(setup)
        runner = "V2" if getattr(config, "use_v2_model_runner", False) else "V1"
        reply = replace(reply, settings=settings_of(config) | {"model_runner": runner})
        with started(config, stages, layouts) as begun:
            facts = facts_from(setup, config, stages, begun)
            prefix = min(PREFIX_TOKENS, facts.max_model_len - 2 - SUFFIX_TOKENS)
            prompts = [
                (Span(7, 0, prefix), Span(8, visit * SUFFIX_TOKENS, SUFFIX_TOKENS)) for visit in range(VISITS)
            ]
            hits = replay(begun.engine, prompts) if facts.caching and prefix > 0 else [0] * VISITS
    except Exception as error:
        return replace(reply, missed=[reason(error, setup.model)])
    percents = [round(100 * hit / (prefix + SUFFIX_TOKENS), 2) for hit in hits[1:]]
    return replace(reply, figures=figures(facts, percents, gpus))


def figures(facts: Facts, hits: list[float], gpus: int) -> Figures:
    kinds = Counter(
        f"{group.layers} {group.kind}"
        + (f" of {group.window}" if group.window else "")
        + (f" in blocks of {group.block_tokens}" if group.block_tokens != facts.block_tokens else "")
        for group in facts.groups
    )
    return Figures(
        gpus=gpus,
        groups=[f"{number} x {kind}" for kind, number in kinds.items()],
        block=facts.block_tokens,
        hit_unit=facts.hit_tokens,
        hits=hits,
        pool_tokens=facts.tokens_fit,
        concurrency=round(facts.tokens_fit / facts.max_model_len, 2) if facts.max_model_len else 0.0,
        caching=facts.caching,
        retention="dense" if facts.retention is None else str(facts.retention),
        chunk=facts.batched_tokens,
        seats=facts.max_requests,
    )


def settings_of(config: Any, above: str = "") -> dict[str, str]:
    """Return the values of a configuration, by dotted names without `_config`."""
    values: dict[str, str] = {}
    for field in dataclasses.fields(config):
        name, value = f"{above}{field.name.removesuffix('_config')}", getattr(config, field.name, None)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            values |= settings_of(value, f"{name}.")
        else:
            values[name] = text_of(value)
    return {name: text for name, text in values.items() if not UNLIKE.search(name)}


def text_of(value: Any) -> str:
    """Return a value as text: of an object its class alone, of a file's path nothing."""
    if isinstance(value, list | tuple | set | frozenset):
        texts = [text_of(each) for each in value]
        return f"[{', '.join(sorted(texts) if isinstance(value, set | frozenset) else texts)}]"
    if isinstance(value, enum.Enum):
        return str(value.name)
    if value is None or isinstance(value, bool | int | float | str) or type(value).__name__ == "dtype":
        text = str(value).removeprefix("torch.")
        return "" if "/" in text else text
    return type(value).__name__


def of_version() -> OfVersion:
    """Return what the installed version names: flags, variables, metrics, the fields of KV events."""
    named: dict[str, Any] = {}
    missed = []
    for what in (flags, variables, metrics, events):
        try:
            named[what.__name__] = what()
        except Exception as error:
            missed.append(f"{what.__name__}: {reason(error)}")
    return OfVersion(version=installed_version(), site=str(_root().parent), missed=missed, **named)


def flags() -> dict[str, Flag]:
    """Return the flags of `vllm serve` by their names; a switch has one name, without its opposite."""
    named: dict[str, Flag] = {}
    for action in serve_parser()._actions:
        shown = action.default is not argparse.SUPPRESS
        flag = Flag(
            default=text_of(action.default) if shown else "",
            dest=action.dest,
            help=" ".join(str(action.help).split()),
        )
        names = [name for name in action.option_strings if name.startswith("--")]
        named |= dict.fromkeys({SWITCH.sub("--", name): name for name in reversed(names)}.values(), flag)
    return named


def variables() -> dict[str, str]:
    """Return vLLM's environment variables with their defaults; "" for a place, and for what is drawn at random."""
    from vllm import envs

    named: dict[str, str] = {}
    for name, read in envs.environment_variables.items():
        os.environ.pop(name, None)  # this fork's
        named[name] = ""
        with contextlib.suppress(Exception):
            named[name] = "" if UNLIKE.search(name) else text_of(read())
    return named


def _root() -> Path:
    import vllm

    return Path(str(vllm.__file__)).parent


def metrics() -> list[str]:
    """Return the names of metrics in vLLM's files: which of them a server has depends on its flags."""
    files = (path.read_bytes() for path in _root().rglob("*.py"))
    return sorted({name.decode() for file in files for name in METRIC.findall(file)})


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
    main(Path(sys.argv[1]), Path(sys.argv[2]))
