"""Checks, before vLLM is imported, that an engine can be simulated and that its pool's size is known."""

from __future__ import annotations

import msgspec

from kvtune.engine.flags import flag_value
from kvtune.engine.platform import engines
from kvtune.engine.resolve import check_engine, check_pool, resolve
from kvtune.errors import KvtuneError, UsageError
from kvtune.sim.settings import SimSettings
from kvtune.vllm.parts import differing

TOO_SMALL = "the pool holds"
"""The start of the error message for a pool that cannot hold one request of the maximum length."""


def check_vllm() -> None:
    """Raise KvtuneError if vLLM is not installed, or if its code differs from the code that the simulator knows."""
    version = check_engine()
    if why := differing(("simulator",)):
        raise KvtuneError(
            f"the simulator does not know vLLM {version}: {why}",
            "measure on the engine (--on engine); `kvtune doctor` lists what works with this vLLM",
        )


def sized(settings: SimSettings) -> SimSettings:
    """Return the settings with the simulated device's memory, which sizes the pool if no flag does.

    Raise UsageError if the pool's size is unknown, or if the flags ask for more than one engine.
    """
    engine_count = flag_value(settings.engine_args, "data-parallel-size") or "1"
    if engine_count != "1":
        raise UsageError(
            f"--data-parallel-size {engine_count}: a replay has one engine, whose cache no other engine shares",
            "leave it out and replay the requests that one engine gets; or measure all with --on engine: `kvtune "
            "explain RUN` then replays each",
        )
    if settings.specs:
        return settings
    platform = engines(settings.like_device)
    words = resolve(settings.model, dummy=True, engine_args=settings.engine_args, platform=platform).args
    check_pool(words, platform.memory_bytes)
    return msgspec.structs.replace(settings, memory_bytes=platform.memory_bytes)
