"""What vLLM calls in each of its processes, as entry points of the group `vllm.general_plugins`.

Contract: a process in which no variable asks for a part imports this module alone, and nothing of vLLM is replaced. No
error of kvtune's leaves this module, because vLLM catches none: the engine would not start. One line says which part is
off. With KVTUNE_STRICT=1 an error of the core does leave it, and the engine stops.
"""

from __future__ import annotations

import importlib
import logging
import os

logger = logging.getLogger("vllm.kvtune")


def core() -> None:
    _register("kvtune.plugin.core.plugin", "KVTUNE_CORE", "KVTUNE_RECIPE", "KVTUNE_AVX512_BF16")


def probe() -> None:
    _register("kvtune.plugin.probe.plugin", "KVTUNE_RUN_DIR")


def recorder() -> None:
    _register("kvtune.plugin.probe.recorder", "KVTUNE_RECORD", "KVTUNE_METRICS_DIR")


def _register(module: str, *variables: str) -> None:
    """Call the module's `register` if one of the variables is set."""
    if not any(os.environ.get(name) for name in variables):
        return
    try:
        importlib.import_module(module).register()
    except Exception as error:
        if module == "kvtune.plugin.core.plugin" and os.environ.get("KVTUNE_STRICT") == "1":
            raise
        logger.warning("kvtune: %s is off: %s: %s", module, type(error).__name__, error, exc_info=error)
