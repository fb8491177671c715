"""Skips steady decoding: while nobody can come or go, k steps are scheduled as one. Simulator's process only.

vLLM takes the k - 1 tokens in advance as speculative ones that all hold. Exact, because between two events the
scheduler would repeat itself: blocks are handed out in the same number (with one full-attention group) or not at all
(otherwise a jump ends before the next block is taken or given back), and nobody looks anything up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvtune.errors import UsageError
from kvtune.sim.clock import VirtualClock
from kvtune.sim.front_end import FrontEnd

LONGEST = 4096


class Jumper:
    """`prepare` before EngineCore's step turns it into a jump where it can; `ends` are then the single steps' ends."""

    def __init__(self, engine: Any, front: FrontEnd, clock: VirtualClock) -> None:
        from vllm.v1.core.sched.interface import PauseState

        if engine.batch_queue is not None:
            raise UsageError(
                "modes jump and coarse simulate the synchronous scheduler only",
                "use mode exact, or async_scheduling off",
            )
        self._engine, self._scheduler, self._front, self._clock = engine, engine.scheduler, front, clock
        self._executor = engine.model_executor
        self._cost = self._executor.machine.cost
        self._events = _event_residues(self._scheduler)
        self._limits = (
            self._scheduler.max_num_scheduled_tokens,
            self._scheduler.scheduler_config.max_num_batched_tokens,
        )
        self.blocked = self._decoding = False
        # Who is next may be another one in each step where the queue goes by what is cached.
        self._in_turn = not getattr(self._scheduler.waiting, "reorders", False)
        self._before = (0, 0)
        self.ends: list[float] | None = None
        self._update = self._scheduler._update_request_with_output
        # A pause for new requests: nobody is looked up in a jump, and the kvtune core's steady path stands aside.
        self._unpaused, self._paused = PauseState.UNPAUSED, PauseState.PAUSED_NEW

    def prepare(self) -> None:
        self._before = (len(self._scheduler.running), len(self._scheduler.waiting))
        self.ends = None
        steps = self._steps()
        if steps < 2:
            return
        ends = self._ends(steps)
        if len(ends) < 2:
            return
        self.ends = ends
        extra = [0] * (len(ends) - 1)
        for request in self._scheduler.running:
            request.spec_token_ids = extra
        # No request ends inside a jump: vLLM need not look at each of its tokens.
        self._scheduler._update_request_with_output = _append_all
        self._executor.decode_tokens = len(ends)
        self._executor.cost_of_jump = lambda: ends[-1] - self._start()
        self._scheduler._pause_state = self._paused
        self._allow(len(ends) * len(self._scheduler.running))

    def rest(self, blocked: bool = False) -> None:
        """The last step was another's. `blocked`: everybody decoded, and those who waited still do."""
        self.ends, self.blocked = None, blocked and self._in_turn

    def settle(self, outputs: Any) -> None:
        """After the step: what changed says whether the waiting ones are still blocked."""
        if self.ends is not None:
            self._scheduler._update_request_with_output = self._update
            self._scheduler._pause_state = self._unpaused
            self._executor.decode_tokens = 1
            self._executor.cost_of_jump = None
            self._scheduler.max_num_scheduled_tokens = self._limits[0]
            self._scheduler.scheduler_config.max_num_batched_tokens = self._limits[1]
            self._clock.now_s = self._clock.device_free_s = self.ends[-1]
            manager = self._scheduler.kv_cache_manager
            if (
                manager.enable_caching
            ):  # single steps would have cached what they filled; the next step may preempt
                for request in self._scheduler.running:
                    manager.cache_blocks(request, request.num_computed_tokens)
        after = (len(self._scheduler.running), len(self._scheduler.waiting))
        # A pure decode step has room for a waiting request: if none came in, the first of them does not fit.
        self.blocked = self._in_turn and self._decoding and self._before[1] > 0 and after == self._before

    def _allow(self, tokens: int) -> None:
        self._scheduler.max_num_scheduled_tokens = max(tokens, self._limits[0])
        self._scheduler.scheduler_config.max_num_batched_tokens = max(tokens, self._limits[1])

    def _start(self) -> float:
        return max(self._clock.now_s, self._clock.device_free_s)

    def _steps(self) -> int:
        """How many steps from here are alike, as far as requests and blocks are concerned."""
        scheduler = self._scheduler
        running: Sequence[Any] = scheduler.running
        self._decoding = False
        if not running or self._events is None or len(running) >= min(self._limits):
            return 1
        if any(r.num_tokens - r.num_computed_tokens != 1 or r.spec_token_ids for r in running):
            return 1
        self._decoding = True
        if (scheduler.waiting or scheduler.kv_holding_waiting) and not self.blocked:
            return 1
        steps = LONGEST
        for request in running:
            left = request.max_tokens - request.num_output_tokens - 1
            if left < steps:
                steps = left
                if steps < 2:
                    return 1
        return self._until_blocks(running, steps)

    def _until_blocks(self, running: Sequence[Any], steps: int) -> int:
        events = self._events
        assert events is not None
        manager = self._scheduler.kv_cache_manager
        free = manager.block_pool.get_num_free_blocks()
        if events:
            if free < len(running) * len(manager.coordinator.single_type_managers):
                return 1
            for request in running:
                computed = request.num_computed_tokens
                for period, residue in events:
                    steps = min(steps, (residue - computed - 1) % period + 1)
            return steps
        block = manager.coordinator.single_type_managers[0].block_size
        while steps >= 2:
            needed = sum(
                -(-(r.num_computed_tokens + steps) // block) - -(-r.num_computed_tokens // block)
                for r in running
            )
            if needed <= free:
                return steps
            steps //= 2
        return 1

    def _ends(self, steps: int) -> list[float]:
        """The ends of the single steps, added up as the exact mode does; stops where a request arrives."""
        due = self._front.next_time()
        running = self._scheduler.running
        context = sum(r.num_computed_tokens for r in running)
        decodes = len(running)
        ends: list[float] = []
        at = self._start()
        seconds = self._cost.seconds
        for _ in range(steps):
            if due is not None and due <= at:
                break
            at += seconds(0, decodes, context)
            context += decodes
            ends.append(at)
        return ends


def _append_all(request: Any, new_token_ids: list[int], is_stale: bool = False) -> tuple[list[int], bool]:
    request.append_output_token_ids(new_token_ids)
    return new_token_ids, False


def _event_residues(scheduler: Any) -> list[tuple[int, int]] | None:
    """(period, residue) of computed tokens at which a group takes or gives back blocks; a jump may start there only.

    Empty for one full-attention group, where only the number of blocks counts; None where no jump is exact.
    """
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    kinds = [type(m.kv_cache_spec).__name__ for m in managers]
    if len(managers) == 1 and kinds[0] in ("FullAttentionSpec", "MLAAttentionSpec"):
        return []
    found = set()
    for manager, kind in zip(managers, kinds, strict=True):
        block = manager.block_size
        if kind in ("FullAttentionSpec", "MLAAttentionSpec"):
            found.add((block, 0))
        elif kind == "SlidingWindowSpec":
            found |= {(block, 0), (block, (manager.sliding_window - 1) % block)}
        elif kind == "MambaSpec":
            found |= {(block, 0), (block, 1 % block), (block, block - 1)}
        else:
            return None
    return sorted(found)
