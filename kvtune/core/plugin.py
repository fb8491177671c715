"""Entry point that vLLM calls in each of its processes. Inert unless KVTUNE_CORE or KVTUNE_RECIPE is set.

Contract: idempotent, cheap, all or nothing. A vLLM that differs from the manifest runs stock, with one line in the log
that names the symbol; with KVTUNE_STRICT=1 the engine stops instead.
"""

from __future__ import annotations

import importlib
import logging
import os
from types import ModuleType

from kvtune.core import cpu_flags, state
from kvtune.core.settings import CoreSettings, from_environment
from kvtune.errors import KvtuneError

logger = logging.getLogger("vllm.kvtune")

PARTS = (
    "cache.adopt",
    "cache.legacy",
    "tokens.install",
    "steps.scheduler",
    "admission.install",
    "freeze",
    "cache.packed",
)
"""Modules of kvtune.core with `install(settings)`, in the order of installation."""

_registered = False


def register() -> None:
    """Load the core when the environment asks for it; idempotent and cheap."""
    global _registered
    cpu_flags.install()
    if _registered or not (os.environ.get("KVTUNE_CORE") or os.environ.get("KVTUNE_RECIPE")):
        return
    _registered = True
    try:
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
    """Check this vLLM against the manifest, then install every part. KvtuneError when it differs."""
    from kvtune.core.cache import audit
    from kvtune.core.compat import manifest as compat

    compat.check()
    modules = [m for m in map(_part, PARTS) if m is not None]
    state.activate(settings)
    done: list[ModuleType] = []
    try:
        for module in modules:
            done.append(module)
            module.install(settings)
        done.append(audit)
        audit.install()
    except Exception:
        # All or nothing: a half-installed core is worse than none.
        for module in reversed(done):
            getattr(module, "uninstall", lambda: None)()
        raise
    logger.info("kvtune core is active: %s", settings.changed() or "defaults")


def _part(name: str) -> ModuleType | None:
    full = f"kvtune.core.{name}"
    try:
        return importlib.import_module(full)
    except ModuleNotFoundError as error:
        if error.name != full:
            raise
        return None


def _refuse(why: str) -> None:
    state.refuse(why)
    logger.warning("kvtune core is not loaded, stock vLLM runs: %s", why)
    if os.environ.get("KVTUNE_STRICT") == "1":
        raise KvtuneError(why, "unset KVTUNE_STRICT to run stock vLLM instead")
