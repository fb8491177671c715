"""Loads the core into a process of vLLM if KVTUNE_CORE or KVTUNE_RECIPE asks for it (from `plugin/entry_points.py`).

Contract: idempotent, cheap. A part does not load if a vLLM symbol that it needs has changed; the run file names the
symbol, and the other parts load. With core.strict the core then loads no part at all; with KVTUNE_STRICT=1 the engine
stops. `cpu_tier` is installed with stock, too; `cpu_flags` if KVTUNE_AVX512_BF16 is set.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Collection
from types import ModuleType
from typing import NamedTuple

from kvtune.base.errors import KvtuneError
from kvtune.data.knobs import CoreSettings
from kvtune.plugin.core import state
from kvtune.plugin.core.cpu_tier import install as cpu_tier
from kvtune.plugin.core.settings import from_environment, without
from kvtune.plugin.vllm import cpu_flags
from kvtune.plugin.vllm.plugin_state import STATE

logger = logging.getLogger("vllm.kvtune")

PART = "core"


class Module(NamedTuple):
    """The part that a module belongs to (empty: it loads into any vLLM), and the switches that turn it on."""

    part: str
    switches: tuple[str, ...]


MODULES = {
    "cache.adopt": Module("pool", ("pool", "pinning")),
    "cache.states": Module("states", ("keep_states",)),
    "tokens.install": Module("decode", ("rows",)),
    "steps.scheduler": Module("decode", ("steady", "empty_blocks")),
    "freeze": Module("", ("freeze", "collect_at_wait")),
    "outputs.install": Module("outputs", ("front_end",)),
    "cache.packed": Module("layout", ("packed", "whole_states")),
}
"""Modules of kvtune.plugin.core with `install(settings)`, in the order of installation."""


def register() -> None:
    """Load the core if KVTUNE_CORE or KVTUNE_RECIPE asks for it; further calls do nothing."""
    try:
        cpu_flags.install()
        if PART in STATE.loaded or not (os.environ.get("KVTUNE_CORE") or os.environ.get("KVTUNE_RECIPE")):
            return
        STATE.loaded.add(PART)
        cpu_tier.install()
        settings = from_environment()
        if settings is None:
            state.refuse("stock was asked for")
            return
        install(settings)
    except KvtuneError as error:
        _refuse(f"{error.message} ({error.hint})" if error.hint else error.message)
    except Exception as error:
        _refuse(f"{type(error).__name__}: {error}")


def install(settings: CoreSettings) -> None:
    """Install the parts that the settings ask for and whose vLLM symbols are unchanged.

    Raises KvtuneError if no part can load; with core.strict or KVTUNE_STRICT=1 also if any part cannot.
    """
    from kvtune.plugin.vllm import parts

    asked = settings.switches()
    standing = parts.standing()
    off = switches_of(standing.left_out)
    line = standing.line([part for part in standing.left_out if set(asked) & set(switches_of((part,)))])
    strict = settings.strict or os.environ.get("KVTUNE_STRICT") == "1"
    if line and (strict or set(off) >= set(asked)):
        raise KvtuneError(line, "install a vLLM that kvtune knows, or run stock (KVTUNE_CORE=stock)")
    state.activate(settings)
    for name in off:
        if name in asked:
            state.part(name, False)
    if line:
        state.note(line)
        logger.warning("kvtune: %s", line)
    allowed = without(settings, off)
    done: list[ModuleType] = []
    try:
        for name, (part, _) in MODULES.items():
            if part not in standing.left_out:
                _install(name, allowed, done, strict)
    except Exception:
        # `strict`: undo everything rather than run half a core.
        for module in reversed(done):
            STATE.remove(module.PART)
        raise
    logger.info("kvtune core is active: %s", settings.changed() or "defaults")


def switches_of(parts: Collection[str]) -> tuple[str, ...]:
    """Return the switches of these parts' modules."""
    return tuple(switch for module in MODULES.values() if module.part in parts for switch in module.switches)


def _install(name: str, settings: CoreSettings, done: list[ModuleType], strict: bool) -> None:
    """Install one module. If that fails, undo it and record its switches as off, or raise with `strict`."""
    module = None
    try:
        module = part_module(name)
        done.append(module)
        module.install(settings)
    except Exception as error:
        if strict:
            raise
        if module is not None:
            STATE.remove(module.PART)
        for switch in MODULES[name].switches:
            if switch in settings.switches():
                state.part(switch, False)
        why = f"{name} could not be put in: {type(error).__name__}: {error}"
        state.note(why)
        logger.error("kvtune: %s", why, exc_info=error)


def part_module(name: str) -> ModuleType:
    return importlib.import_module(f"kvtune.plugin.core.{name}")


def _refuse(why: str) -> None:
    state.refuse(why)
    logger.warning("kvtune core is not loaded, stock vLLM runs: %s", why)
    if os.environ.get("KVTUNE_STRICT") == "1":
        raise KvtuneError(why, "unset KVTUNE_STRICT to run stock vLLM instead")
