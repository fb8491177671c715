"""Checks, before vLLM is imported, that a replay can simulate an engine, and where its pool's size comes from."""

from __future__ import annotations

import msgspec

from kvtune.engine.flags import flag_value
from kvtune.engine.platform import engines
from kvtune.engine.resolve import check_engine, check_pool, resolve
from kvtune.errors import KvtuneError, UsageError
from kvtune.sim.settings import SimSettings
from kvtune.vllm.parts import differing

TOO_SMALL = "the pool holds"
"""The beginning of the message about a pool without room for one request of the longest length."""


def check_vllm() -> None:
    """Raise KvtuneError if vLLM is not installed, or if the simulator was written for other code than this vLLM's."""
    version = check_engine()
    if why := differing(("simulator",)):
        raise KvtuneError(
            f"the simulator does not know vLLM {version}: {why}",
            "measure on the engine (--on engine); `kvtune doctor` lists what works with this vLLM",
        )


def sized(settings: SimSettings) -> SimSettings:
    """The settings with the memory of the simulated device, which gives the pool's size where no flag does.

    UsageError where nothing gives the size, and for flags that ask for more than one engine.
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
