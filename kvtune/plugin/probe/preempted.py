"""Counts the tokens that an engine computes twice because it preempted their request, by request and cause.

Runs where the scheduler does: in EngineCore (plugin/probe/steps.py) and in a simulator. A preempted request gives its
blocks back, and looks its tokens up again when it goes on:

    0 ....... hit ....... kept ............ whole ......... computed before
      found     evicted     not_retained      partial_block

kept: what it would have hit at once. whole: what whole blocks cover.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvtune.data.tally import split
from kvtune.plugin.vllm.patches import in_place_of
from kvtune.plugin.vllm.types import Request, ScheduledStep, Scheduler

Counts = dict[str, int]


@dataclass(slots=True)
class Again:
    """A request that was preempted. `computed`: the most tokens it had; `hit`: -1 until it goes on."""

    computed: int
    kept: int
    hit: int = -1


class Preempted:
    """Follows one scheduler. `twice`: tokens computed twice, by request id and cause.

    `failed`: why it stopped counting. An engine goes on without it; with `strict` it raises.
    """

    def __init__(self, scheduler: Scheduler, *, strict: bool = True) -> None:
        self.twice: dict[str, Counts] = {}
        self.failed = ""
        self.settle: Callable[[], None] = lambda: (
            None
        )  # sets the fields of requests that are counted elsewhere
        self._again: dict[str, Again] = {}
        self._scheduler = scheduler
        manager = scheduler.kv_cache_manager
        self._caching, self._coordinator = bool(manager.enable_caching), manager.coordinator
        self._unit = hit_unit(scheduler)

        @in_place_of(scheduler, "_preempt_request")
        def preempted(
            preempt: Callable[..., object], request: Request, *args: object, **options: object
        ) -> object:
            computed = request.num_computed_tokens
            result = preempt(request, *args, **options)
            if not self.failed:
                try:
                    self._preempted(request, computed)
                except Exception as error:
                    if strict:
                        raise
                    self.stop(error)
            return result

    def scheduled(self, step: ScheduledStep) -> None:
        """Note which preempted requests go on in this step, and with how many tokens from the cache."""
        if not self._again:
            return
        rows = step.scheduled_cached_reqs
        ids = getattr(rows, "req_ids", ())
        begin = dict(zip(ids, rows.num_computed_tokens, strict=True)) if len(ids) else {}
        begin |= {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
        for name, again in self._again.items():
            if again.hit < 0 and name in begin:
                again.hit = begin[name]

    def stop(self, error: Exception) -> None:
        self.failed = f"{type(error).__name__}: {error}"
        self._again.clear()

    def ended(self) -> dict[str, Counts]:
        """Return what requests that have ended since the last call computed twice, and forget it."""
        for name in [name for name in self._again if name not in self._scheduler.requests]:
            self.finished(name)
        done, self.twice = self.twice, {}
        return done

    def finished(self, request_id: str) -> None:
        """Note that a request has ended: it has computed all that it had before."""
        again = self._again.pop(request_id, None)
        if again is not None:
            self._count(request_id, again, again.computed)

    def close(self) -> None:
        """Count what requests that have not ended have computed twice so far."""
        self.settle()
        for name, again in self._again.items():
            request = self._scheduler.requests.get(name)
            if request is not None:
                self._count(name, again, request.num_computed_tokens)
        self._again.clear()

    def _preempted(self, request: Request, computed: int) -> None:
        name = request.request_id
        before = self._again.pop(name, None)
        if before is not None:
            self._count(name, before, computed)
            computed = max(computed, before.computed)
        kept = 0
        if self._caching:
            limit = max(request.num_tokens - 1, 0)
            kept = int(self._coordinator.find_longest_cache_hit(request.block_hashes, limit)[1])
        self._again[name] = Again(computed, kept)

    def _count(self, name: str, again: Again, reached: int) -> None:
        """Count the tokens from the hit up to `reached` that were computed before."""
        upto = min(reached, again.computed)
        if again.hit < 0 or upto <= again.hit:
            return
        if self._caching:
            edges = [("evicted", again.kept), ("not_retained", upto // self._unit * self._unit)]
        else:
            edges = [("skipped_lookup", upto)]
        counts = self.twice.setdefault(name, {})
        for cause, tokens in split(upto, again.hit, edges, "partial_block").misses.items():
            if tokens:
                counts[cause] = counts.get(cause, 0) + tokens


def hit_unit(scheduler: Scheduler) -> int:
    """Return the number of tokens of which hits are multiples."""
    from kvtune.plugin.vllm.names import hashing

    hashes = hashing(scheduler)
    return int(hashes["hit_alignment_tokens"] or hashes["hash_block_size"])
