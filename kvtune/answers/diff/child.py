"""The process that answers for a version, run by the Python of its environment (`kvtune/base/dialogue.py`).

It is asked set-ups, and answers for the version and for the model of each. A fork asks each: vLLM keeps much in a
process, and a model may end it.
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

from kvtune.answers.diff.answers import PREFIX_TOKENS, SUFFIX_TOKENS, Figures, ModelReply, OfVersion, on_gpus
from kvtune.answers.doctor.facts import Facts
from kvtune.base.dialogue import questions, tell
from kvtune.base.errors import KvtuneError, reason
from kvtune.base.files import read_regular
from kvtune.data.flags import settings_given
from kvtune.data.installed import installed_version
from kvtune.data.layout.models import FOLDER
from kvtune.lab.engine.faults import killer
from kvtune.lab.setup.setup import Setup
from kvtune.plugin.probe.lifetime import die_with_parent
from kvtune.plugin.vllm.names import serve_parser
from kvtune.requests.types import Span

Reply = OfVersion | ModelReply
LIMIT_S = 240
VISITS = 3
MOST_GPUS = 64
SPREADS = {"tensor-parallel-size", "pipeline-parallel-size"}
SPREAD = re.compile(r"--tensor-parallel-size (\d+)|max seq len")
"""Messages about weights that leave no memory on this many GPUs, and about a pool too small for one request."""
EARLY = ("vllm.v1.engine.core", "vllm.model_executor.models.deepseek_v2", "kvtune.answers.doctor.child")
"""What most forks need: imported once."""
METRIC = re.compile(rb'"(vllm:[a-z0-9_]+)"')
SWITCH = re.compile(r"^--(no-|enable-|disable-)+")
UNLIKE = re.compile(
    r"(^|\.)_|hash|instance_id|ports?$|_ip$|host$|_dir$|_path$|_time$|SHM_BUFFER_NAME|^model\.(hf|model$|tokenizer$)"
)
"""Settings and variables of this process or of the model's file, not of the version."""


def main(answers: int) -> None:
    from kvtune.lab.sim.build import run_on

    gc.disable()  # forks end soon
    for number, setup in enumerate(questions(Setup)):
        if not number:
            run_on(setup.platform)
            for module in EARLY:
                with contextlib.suppress(ImportError):  # of another version: a fork says what is missing
                    importlib.import_module(module)
            gc.freeze()  # vLLM collects garbage at each start of an engine: not what is imported here
            _apart(answers, of_version, OfVersion(version=installed_version()))
        _apart(answers, partial(of_model, setup), ModelReply(model=setup.model))


def _apart(answers: int, ask: Callable[[], Reply], nothing: Reply) -> None:
    """Ask in a fork, which answers; if it does not, answer `nothing` with the reason."""
    child = os.fork()
    if child == 0:
        try:
            die_with_parent(signal.SIGKILL)
            signal.alarm(LIMIT_S)
            try:
                reply = ask()
            except Exception as error:
                reply = replace(nothing, missed=[line_of(error)])
            tell(answers, reply)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        name = killer(-os.WTERMSIG(status))
        why = f"the process that asks vLLM was ended by {name} (SIGALRM: after {LIMIT_S} s)"
        tell(answers, replace(nothing, missed=[why]))


def line_of(error: Exception) -> str:
    """Return one line about an error. A built-in model's folder is this process's own: its name stays."""
    text = error.line if isinstance(error, KvtuneError) else f"{type(error).__name__}: {reason(error)}"
    return text.replace(f"{FOLDER}/", "")


def of_model(setup: Setup) -> ModelReply:
    """Ask about one model, on one GPU and then on more until it fits, unless a flag says how many."""
    from kvtune.lab.sim.build import choose_core

    choose_core(setup)
    sized = setup.sized() if setup.machine.memory_bytes or setup.sizes_pool else setup
    may_spread = sized.machine.kind == "cuda" and not settings_given(setup.engine_args) & SPREADS
    gpus = 1
    while True:
        reply = _asked(on_gpus(sized, gpus), gpus)
        need = SPREAD.search(" ".join(reply.missed))
        if not may_spread or gpus >= MOST_GPUS or need is None:
            return reply
        gpus = max(2 * gpus, int(need[1] or 0))


def _asked(setup: Setup, gpus: int) -> ModelReply:
    """Ask about one model on this many GPUs. What is known before an error is kept."""
    from kvtune.answers.doctor.child import facts_from, replay, started
    from kvtune.lab.sim.build import configure

    reply = ModelReply(model=setup.model)
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
        return replace(reply, missed=[line_of(error)])
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
        idle_tokens=(facts.idle[-1].tokens or 0) if facts.idle else 0,
        concurrency=round(facts.tokens_fit / facts.max_model_len, 2) if facts.max_model_len else 0.0,
        prefix_caching=facts.caching,
        retention="dense" if facts.retention is None else str(facts.retention),
        chunk=facts.batched_tokens,
        seats=facts.max_requests,
    )


def settings_of(config: Any, above: str = "") -> dict[str, str]:
    """Return the values of a configuration, by dotted names without `_config`."""
    values: dict[str, str] = {}
    for field in dataclasses.fields(config):
        name = f"{above}{field.name.removesuffix('_config')}"
        value = None if UNLIKE.search(name) else getattr(config, field.name, None)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            values |= settings_of(value, f"{name}.")
        else:
            values[name] = text_of(value)
    return values


def text_of(value: Any) -> str:
    """Return a value as text that is equal on all machines: an object is its class, and a path is empty."""
    if isinstance(value, list | tuple | set | frozenset):
        texts = [text_of(each) for each in value]
        return f"[{', '.join(sorted(texts) if isinstance(value, set | frozenset) else texts)}]"
    if isinstance(value, enum.Enum):
        return str(value.name)
    if value is None or isinstance(value, bool | int | float | str) or type(value).__name__ == "dtype":
        text = str(value).removeprefix("torch.")
        return "" if "/" in text or text == argparse.SUPPRESS else text
    return type(value).__name__


def of_version() -> OfVersion:
    """Return what the installed version names, of each kind."""
    named, missed = {}, []
    for kind, ask in KINDS.items():
        try:
            named[kind] = ask()
        except Exception as error:
            missed.append(f"{kind}: {line_of(error)}")
    return OfVersion(version=installed_version(), site=str(_root().parent), missed=missed, names=named)


def flags() -> dict[str, str]:
    """Return the flags of `vllm serve`; of a switch one name, without its opposite."""
    named: dict[str, str] = {}
    for action in serve_parser()._actions:
        names = {SWITCH.sub("--", name): name for name in reversed(action.option_strings) if name[:2] == "--"}
        named |= dict.fromkeys(names.values(), text_of(action.default))
    return named


def variables() -> dict[str, str]:
    """Return vLLM's environment variables; without a default for a place, and for what is drawn at random."""
    from vllm import envs

    named = dict.fromkeys(envs.environment_variables, "")
    for name in named:
        os.environ.pop(name, None)  # this fork's
        with contextlib.suppress(Exception):
            named[name] = "" if UNLIKE.search(name) else text_of(envs.environment_variables[name]())
    return named


def _root() -> Path:
    import vllm

    return Path(str(vllm.__file__)).parent


def metrics() -> dict[str, str]:
    """Return the metrics in vLLM's files: which of them a server has depends on its flags."""
    files = (read_regular(path, 4 << 20) for path in _root().rglob("*.py") if path.is_file())
    return {name.decode(): "" for file in files for name in METRIC.findall(file)}


def events() -> dict[str, str]:
    """Return the kinds of KV events, and the fields of each."""
    from vllm.distributed import kv_events

    named: dict[str, str] = {}
    for name, kind in vars(kv_events).items():
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind is not msgspec.Struct:
            named |= dict.fromkeys((name, *(f"{name}.{field}" for field in kind.__struct_fields__)), "")
    return named


KINDS = {"flags": flags, "variables": variables, "metrics": metrics, "KV events": events}


if __name__ == "__main__":
    die_with_parent(signal.SIGKILL)
    main(int(sys.argv[1]))
