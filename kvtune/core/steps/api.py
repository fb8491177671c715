"""What the simulator may use of a scheduler with the steady-decode path. Types only.

The simulator computes many steps at once: it gets the cohort and blocks from the path, and advances the requests and
the cohort's counters itself. The result is the same as if the path had run each step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvtune.core.steps.empty import NoopLimits
from kvtune.core.steps.steady import Cohort, Rows
from kvtune.core.steps.tier import Tier
from kvtune.vllm.types import BlockIds, KVCacheBlocks, KVCacheManager, Request, Scheduler


class NoopManager(KVCacheManager, Protocol):
    """A KV cache manager with `NoopSlots`. Code that allocates by other means must drop the request's limits."""

    noop_limits: dict[str, NoopLimits]


class SteadyDecodeScheduler(Scheduler, Protocol):
    """A scheduler with `SteadyDecode`."""

    steady_off: str
    """Why the path is not taken; empty while it can be."""
    steady_runs_ahead: bool
    """Whether steps are scheduled before the last one's output is known (async scheduling)."""
    steady_cohort: Cohort | None
    steady_last_rows: Rows | None
    steady_placed: dict[str, BlockIds]
    steady_limits: Callable[[Request], NoopLimits]
    steady_tier: Tier | None
    steady_allocate: Callable[[Request], KVCacheBlocks | None]

    def find_steady_cohort(self) -> Cohort | None: ...
    def allocate_steady_blocks(self, cohort: Cohort) -> list[BlockIds | None] | None: ...
